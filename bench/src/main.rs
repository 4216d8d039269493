//! gale-bench: measures Gale beside nginx, h2o, haproxy and a minimal floor, and attacks it (`campaign`). `cargo xtask
//! bench` and `cargo xtask campaign` build and start it.
//!
//! It is a separate program because the floor and the clients must be compiled with optimisation, unlike xtask. It
//! reports figures, and judges only absolute ones (a failed request, a connection that did not survive): the exit
//! status is then 1. It refuses to measure a server that does not answer correctly.

mod accept;
mod application;
mod backend;
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

/// Result of a measurement: the document, and whether all absolute requirements hold.
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

/// Name and function of a measurement, and whether it is part of `all`.
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
    // They help to find causes, and do not measure performance.
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
        // Processes that the harness starts, and the charts of earlier results.
        "floor" => return floor::main(rest).map(|()| true),
        "relay" => return floor::relay::main(rest).map(|()| true),
        "floor-reconnecting" => return floor::reconnecting::main(rest).map(|()| true),
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
    // A failure does not stop the others.
    let mut holds = true;
    for (_, measure, _) in chosen {
        let (document, held) = measure(&options)?;
        document.publish(&options.results)?;
        holds &= held;
    }
    Ok(holds)
}

/// Raises the descriptor limit to the need of `idle`, or as far as permitted. The servers inherit the limit.
fn raise_descriptor_limit() {
    const ENOUGH: u64 = 65_536;
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: Some(ENOUGH), maximum: Some(limit.maximum.unwrap_or(ENOUGH).max(ENOUGH)) };
    if setrlimit(Resource::Nofile, wanted).is_err() {
        // Only root may raise the maximum.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    }
}
