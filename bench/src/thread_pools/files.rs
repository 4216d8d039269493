//! slow-ranges and cold-tree: cost of large files for slow clients, and of small files that are not in memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::confine;
use super::data_set::{self, Random};
use super::waits::{self, Waits};
use super::{Experiment, Site, WARM_UP, get, stalls};
use crate::Measured;
use crate::client::swarm::{self, Got, Swarm};
use crate::memory::{Memory, kernel_kib};
use crate::options::Options;
use crate::report::{self, Document};
use crate::servers::{Program, Running};

/// 1 Mbit/s.
const SLOW_BYTES_PER_SECOND: u64 = 125_000;
const RANGE_BYTES: u64 = 1 << 20;

#[derive(Debug, Serialize)]
struct SlowRow {
    server: String,
    clients: Got,
    probe_alone: Got,
    probe: Got,
    /// Memory per client in user space and in the kernel, which includes socket buffers.
    user_kib_per_client: f64,
    kernel_kib_per_client: f64,
    /// Of the whole machine, from the first request on.
    disk_bytes_per_second: Option<f64>,
    stalls: Vec<String>,
    /// Waits of the loops in the kernel of over 20 ms each.
    waits: BTreeMap<String, Waits>,
}

/// Measures a thousand clients at 1 Mbit/s, each at a different offset of one large file.
pub fn measure_slow_ranges(options: &Options) -> Measured {
    let experiment = &options.experiment;
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let site = Site::build(experiment, experiment.range_file_mib << 20)?;
    let length = experiment.range_file_mib << 20;
    eprintln!("writing {} MiB", experiment.range_file_mib);
    let file = site.root().join("large");
    data_set::write_large(&file, length)?;
    let mut rows = Vec::new();
    for program in &programs {
        data_set::forget(&file)?;
        let server = program.start(site.setting(experiment.workers, "sendfile_max_chunk 512k;".to_owned()))?;
        rows.push(slow_ranges(options, &site, &server, length)?);
    }
    let table = report::table_of(
        &rows,
        &[
            ("server", &|row: &SlowRow| row.server.clone()),
            ("Mbit/s per client", &|row| {
                format!("{:.2}", row.clients.bytes_per_second * 8e-6 / experiment.slow_clients as f64)
            }),
            ("read from the disk, MiB/s", &|row| {
                row.disk_bytes_per_second.map_or("–".to_owned(), |bytes| format!("{:.0}", bytes / f64::from(1 << 20)))
            }),
            ("user KiB per client", &|row| format!("{:.1}", row.user_kib_per_client)),
            ("kernel KiB per client", &|row| format!("{:.1}", row.kernel_kib_per_client)),
            ("probe p99 ms", &|row| format!("{:.1} / {:.1}", row.probe.p99_ms, row.probe_alone.p99_ms)),
            ("probe max ms", &|row| format!("{:.1} / {:.1}", row.probe.max_ms, row.probe_alone.max_ms)),
            ("stalls logged", &|row| row.stalls.len().to_string()),
            ("loops waited over 20 ms for", &|row| waits::text(&row.waits)),
            ("errors", &|row| row.clients.errors.to_string()),
        ],
    );
    let body = format!(
        "{}{} clients at 1 Mbit/s each, in ranges of 1 MiB of a file of {} MiB, none of it in memory at first; \
         {} workers, {}, {}. Of two figures in a cell, the second is without the clients. Kernel memory is the \
         growth of the whole machine's. The reasons for waits of the event loops come from the kernel stacks of their \
         threads in state D, sampled every 5 ms: a page that was believed to be in memory (stale belief), the \
         submission of read-ahead, or reclaim of memory for the control group.\n\n{table}",
        site.notes(),
        experiment.slow_clients,
        experiment.range_file_mib,
        experiment.workers,
        site.memory(experiment),
        site.disk(experiment)
    );
    let holds = rows.iter().all(|row| row.clients.errors == 0);
    Ok((Document::new("slow-ranges", "A thousand slow clients of one large file", &programs, &body, &rows)?, holds))
}

fn slow_ranges(options: &Options, site: &Site, server: &Running, length: u64) -> Result<SlowRow, String> {
    let clients = options.experiment.slow_clients;
    let probe_alone = probe_for(server, options.run_time)?;
    let (memory, kernel) = (Memory::read(&server.root.tree()), kernel_kib());
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let mut range = |_: usize| {
        let first = random.below(usize::try_from(length - RANGE_BYTES).unwrap_or(usize::MAX));
        let last = first as u64 + RANGE_BYTES - 1;
        format!("GET /files/large HTTP/1.1\r\nHost: bench\r\nRange: bytes={first}-{last}\r\n\r\n")
    };
    let ends = AtomicBool::new(false);
    let swarm = Swarm {
        address: &server.address,
        connections: clients,
        request: &mut range,
        warm_up: WARM_UP,
        run_time: options.run_time + Duration::from_secs(5),
        ends: &ends,
        bytes_per_second: Some(SLOW_BYTES_PER_SECOND),
        asks_every: Duration::ZERO,
        certificate: None,
    };
    let device = confine::device_of(site.root());
    let disk = || Some((Instant::now(), confine::bytes_read(device?)?));
    let disk_before = disk();
    let (got, probe, loaded, kernel_loaded, disk_loaded, waits) = std::thread::scope(|scope| {
        let waits = scope.spawn(|| waits::watch(server.root, &ends));
        let swarm = scope.spawn(move || swarm.run());
        let probe = probe_for(server, options.run_time);
        let loaded = Memory::read(&server.root.tree());
        let kernel_loaded = kernel_kib();
        let disk_loaded = disk();
        ends.store(true, Ordering::Relaxed);
        let got = swarm.join().expect("a client does not panic");
        (got, probe, loaded, kernel_loaded, disk_loaded, waits.join().expect("the watching thread does not panic"))
    });
    let row = SlowRow {
        server: server.label.clone(),
        clients: got?,
        probe_alone,
        probe: probe?,
        user_kib_per_client: (loaded.pss_kib as f64 - memory.pss_kib as f64) / clients as f64,
        disk_bytes_per_second: disk_before.zip(disk_loaded).map(|((since, before), (until, after))| {
            (after - before) as f64 / until.duration_since(since).as_secs_f64()
        }),
        kernel_kib_per_client: (kernel_loaded as f64 - kernel as f64) / clients as f64,
        stalls: stalls(&server.error_log()),
        waits,
    };
    eprintln!("  {}: {:.1} KiB a client, probe p99 {:.1} ms", row.server, row.user_kib_per_client, row.probe.p99_ms);
    Ok(row)
}

fn probe_for(server: &Running, run_time: Duration) -> Result<Got, String> {
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let probe = scope.spawn(|| swarm::probe(&server.address, "/return", WARM_UP, &ends));
        std::thread::sleep(WARM_UP + run_time);
        ends.store(true, Ordering::Relaxed);
        probe.join().expect("the probe does not panic")
    })
}

#[derive(Debug, Serialize)]
struct TreeRow {
    server: String,
    cold: Got,
    hot_alone: Got,
    hot: Got,
    stalls: Vec<String>,
}

const TREE_CONNECTIONS: usize = 64;
/// Only until all are connected, because files are coldest at the beginning.
const TREE_WARM_UP: Duration = Duration::from_millis(200);

/// Measures random small files, of which neither contents nor names are in memory, beside one that is requested every
/// 20 ms.
pub fn measure_cold_tree(options: &Options) -> Measured {
    // A file takes a block and an inode. Its disk is remounted for each server, which evicts everything.
    let experiment = Experiment { on_small_disk: true, ..options.experiment.clone() };
    let bytes = experiment.tree_files as u64 * 6 * 1024;
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let mut site = Site::build(&experiment, bytes)?;
    eprintln!("writing {} small files", experiment.tree_files);
    data_set::write_tree(site.root(), experiment.tree_files)?;
    let mut rows = Vec::new();
    for program in &programs {
        rows.push(cold_tree(options, &mut site, program)?);
    }
    let table = report::table_of(
        &rows,
        &[
            ("server", &|row: &TreeRow| row.server.clone()),
            ("cold requests/s", &|row| format!("{:.0}", row.cold.requests_per_second)),
            ("cold p50 ms", &|row| format!("{:.1}", row.cold.p50_ms)),
            ("cold p99 ms", &|row| format!("{:.1}", row.cold.p99_ms)),
            ("hot p50 ms", &|row| format!("{:.1} / {:.1}", row.hot.p50_ms, row.hot_alone.p50_ms)),
            ("hot p99 ms", &|row| format!("{:.1} / {:.1}", row.hot.p99_ms, row.hot_alone.p99_ms)),
            ("hot max ms", &|row| format!("{:.1} / {:.1}", row.hot.max_ms, row.hot_alone.max_ms)),
            ("stalls logged", &|row| row.stalls.len().to_string()),
            ("errors", &|row| row.cold.errors.to_string()),
        ],
    );
    let body = format!(
        "{}{} files of 1 KiB, none of them in memory, requested at random over {TREE_CONNECTIONS} connections, beside \
         a file of 1 KiB that is requested every 20 ms; {} workers, {}. Of two figures in a cell, the second is \
         without the cold requests.\n\n{table}",
        site.notes(),
        experiment.tree_files,
        experiment.workers,
        site.disk(&experiment)
    );
    let holds = rows.iter().all(|row| row.cold.errors == 0);
    Ok((Document::new("cold-tree", "Small files, none of them in memory", &programs, &body, &rows)?, holds))
}

fn cold_tree(options: &Options, site: &mut Site, program: &Program) -> Result<TreeRow, String> {
    if let Some(disk) = &mut site.disk {
        disk.forget()?;
    }
    let setting = site.setting(options.experiment.workers, String::new());
    let server = program.start(setting)?;
    cold_requests(options, &server)
    // The server ends here: the disk can be remounted only when it is not in use.
}

fn cold_requests(options: &Options, server: &Running) -> Result<TreeRow, String> {
    let address = server.address.as_str();
    let hot = |run_time: Duration, ends: &AtomicBool| {
        std::thread::scope(|scope| {
            let probe = scope.spawn(|| swarm::probe(address, "/file", TREE_WARM_UP, ends));
            std::thread::sleep(TREE_WARM_UP + run_time);
            ends.store(true, Ordering::Relaxed);
            probe.join().expect("the probe does not panic")
        })
    };
    let hot_alone = hot(options.run_time, &AtomicBool::new(false))?;
    let mut random = Random(u64::from(std::process::id()) | 1 << 40);
    let files = options.experiment.tree_files;
    let mut any = move |_: usize| get(&format!("/files/{}", data_set::tree_path(random.below(files))));
    let ends = AtomicBool::new(false);
    let swarm = Swarm {
        address,
        connections: TREE_CONNECTIONS,
        request: &mut any,
        warm_up: TREE_WARM_UP,
        // The probe ends the run.
        run_time: options.run_time + Duration::from_secs(60),
        ends: &ends,
        bytes_per_second: None,
        asks_every: Duration::ZERO,
        certificate: None,
    };
    let (cold, hot) = std::thread::scope(|scope| {
        let swarm = scope.spawn(move || swarm.run());
        let hot = hot(options.run_time, &ends);
        (swarm.join().expect("a client does not panic"), hot)
    });
    let row = TreeRow {
        server: server.label.clone(),
        cold: cold?,
        hot_alone,
        hot: hot?,
        stalls: stalls(&server.error_log()),
    };
    eprintln!("  {}: hot p99 {:.1} of {:.1} ms", row.server, row.hot.p99_ms, row.hot_alone.p99_ms);
    Ok(row)
}
