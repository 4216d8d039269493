//! gale-bench: measures Gale beside nginx, h2o, haproxy and a bare floor, and attacks it (`campaign`); `cargo xtask
//! bench` and `cargo xtask campaign` build and start it.
//!
//! It is a program of its own, and not a part of xtask, because the floor and the load must be compiled with
//! optimisation while the chores are not. It measures and reports, and passes judgement only where a figure is
//! absolute (a failed request, a connection that did not survive): the exit status is then 1. It refuses to
//! measure a server that does not answer correctly first.

mod accept;
mod application;
mod behind;
mod beside;
mod burst;
mod caches;
mod callgrind;
mod campaign;
mod case;
mod certificate;
mod check;
mod client;
mod cpu;
mod figures;
mod first_byte;
mod floods;
mod floor;
mod grpc;
mod idle;
mod idle_tls;
mod instructions;
mod interpreter;
mod location;
mod locked;
mod lookups;
mod memory;
mod names;
mod options;
mod parts;
mod path;
mod process;
mod profile;
mod reload;
mod report;
mod respawn;
mod ring;
mod scaling;
mod servers;
mod slow_peers;
mod stream;
mod support;
mod syscalls;
mod thread_pools;
mod tunnels;
mod under_load;
mod upstreams;

use std::process::ExitCode;

use options::Options;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What a measurement gives back: the document and whether every absolute figure holds.
type Measured = Result<(report::Document, bool), String>;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::from(2)
        }
    }
}

/// A measurement, its name, and whether it is one of `all`.
type Entry = (&'static str, fn(&Options) -> Measured, bool);

/// In the order of `all`.
const MEASUREMENTS: &[Entry] = &[
    ("cpu", cpu::measure, true),
    ("syscalls", syscalls::measure, true),
    ("idle", idle::measure, true),
    ("accept", accept::measure, true),
    ("scaling", scaling::measure, true),
    ("reload", reload::measure, true),
    ("respawn", respawn::measure, true),
    // They say where to look, not how good it is.
    ("instructions", instructions::measure, false),
    ("parts", parts::measure, false),
    ("locked", locked::measure, false),
    ("lookups", lookups::measure, false),
    ("figures", figures::measure, false),
    ("check", check::measure, false),
    ("profile", profile::measure, false),
    ("files", cpu::measure_files, false),
    ("http2", cpu::measure_http2, false),
    ("floods", floods::measure, false),
    ("tls", cpu::measure_tls, false),
    ("idle-tls", idle_tls::measure, false),
    ("names", names::measure, false),
    ("path", path::measure, false),
    ("cache", cpu::measure_cache, false),
    ("cache-collapse", caches::collapse::measure, false),
    ("cache-hits", caches::hits::measure, false),
    ("proxy", cpu::measure_proxy, false),
    ("applications", cpu::measure_applications, false),
    ("first-byte", first_byte::measure, false),
    ("scrapes", beside::measure_scrapes, false),
    ("large-reload", beside::measure_reloads, false),
    ("large-put", beside::measure_replacements, false),
    ("burst", burst::measure, false),
    ("stream", stream::measure, false),
    ("tunnels", tunnels::measure, false),
    ("upstreams", upstreams::measure, false),
    // They write gigabytes.
    ("cache-million", caches::million::measure, false),
    ("cache-disks", caches::disks::measure, false),
    ("slow-peers", slow_peers::measure, false),
    ("thread-pools", thread_pools::measure, false),
    ("slow-ranges", thread_pools::files::measure_slow_ranges, false),
    ("cold-tree", thread_pools::files::measure_cold_tree, false),
    ("rare-files", thread_pools::rare::measure, false),
    ("late", thread_pools::late::measure, false),
];

fn run(args: &[String]) -> Result<bool, String> {
    let Some((measurement, rest)) = args.split_first() else {
        eprint!("{}", options::USAGE);
        return Ok(false);
    };
    if measurement == "campaign" || measurement == "campaign-trial" {
        raise_descriptor_limit();
        return if measurement == "campaign" { campaign::main(rest) } else { campaign::trial(rest) };
    }
    if measurement == "--help" || rest.iter().any(|arg| arg == "--help") {
        print!("{}", options::USAGE);
        return Ok(true);
    }
    match measurement.as_str() {
        // Parts that the harness starts as processes of their own, and the charts of earlier results.
        "floor" => return floor::main(rest).map(|()| true),
        "relay" => return floor::relay::main(rest).map(|()| true),
        "floor-behind" => return floor::behind::main(rest).map(|()| true),
        "lean" => return client::lean::main(rest).map(|()| true),
        "handshakes" => return client::handshakes::main(rest).map(|()| true),
        "charts" => return thread_pools::draw_charts(&Options::parse(rest)?.results).map(|()| true),
        _ => {}
    }
    let is_chosen = |(name, _, in_all): &&Entry| if measurement == "all" { *in_all } else { measurement == name };
    let chosen: Vec<&Entry> = MEASUREMENTS.iter().filter(is_chosen).collect();
    if chosen.is_empty() {
        return Err(format!("there is no measurement \"{measurement}\"\n\n{}", options::USAGE));
    }
    let options = Options::parse(rest)?;
    raise_descriptor_limit();
    // All of them, also after one that does not hold.
    let mut holds = true;
    for (_, measure, _) in chosen {
        let (document, held) = measure(&options)?;
        document.publish(&options.results)?;
        holds &= held;
    }
    Ok(holds)
}

/// As many descriptors as `idle` may need, or as many as we are allowed; the servers inherit the limit.
fn raise_descriptor_limit() {
    const ENOUGH: u64 = 65_536;
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: Some(ENOUGH), maximum: Some(limit.maximum.unwrap_or(ENOUGH).max(ENOUGH)) };
    if setrlimit(Resource::Nofile, wanted).is_err() {
        // Only root raises the maximum.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    }
}
