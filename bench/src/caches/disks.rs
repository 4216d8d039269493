//! cache-disks: the cache node with three disks. Hits in memory beside cold ones that saturate the disks; then one disk
//! hangs, and the shares of the other two should not notice.
//!
//! The disks are loop devices with a file system each, and a control group holds what is read from them: on one machine
//! there are no three real ones. A disk that hangs is one from which a byte a second may be read.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::programs;
use crate::Measured;
use crate::behind::Behind;
use crate::client::swarm::{Got, Swarm};
use crate::options::Options;
use crate::report::{self, Document};
use crate::servers::{Program, Running, Setting};
use crate::thread_pools::confine::{self, Cage, Device, SmallDisk};
use crate::thread_pools::data_set::Random;
use crate::thread_pools::{get, stalls};

const DISKS: usize = 3;
const OBJECT_BYTES: usize = 1 << 20;
/// Of each disk: together three times the memory.
const OBJECTS: usize = 512;
const MEMORY_BYTES: u64 = 512 << 20;
const DISK_BYTES_PER_SECOND: u64 = 30 << 20;
/// A byte a second.
const HUNG: u64 = 1;
const COLD_CONNECTIONS: usize = 20;
const HOT_CONNECTIONS: usize = 10;
const WARM_UP: Duration = Duration::from_secs(2);

/// What one disk's clients got: of one object that is in memory, and of any.
#[derive(Clone, Copy, Debug, Serialize)]
struct Share {
    hot: Got,
    cold: Option<Got>,
}

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    alone: Vec<Share>,
    saturated: Vec<Share>,
    /// The last disk hangs.
    hung: Vec<Share>,
    stalls: Vec<String>,
}

/// Removed in this order: the group must be empty, the disks unmounted.
struct Site {
    cage: Cage,
    disks: Vec<SmallDisk>,
    devices: Vec<Device>,
    directory: PathBuf,
}

impl Drop for Site {
    fn drop(&mut self) {
        self.disks.clear();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

pub fn measure(options: &Options) -> Measured {
    let programs = programs(options)?;
    let behind = Behind::start(options.client_core, OBJECT_BYTES)?;
    let mut rows = Vec::new();
    let mut notes = String::new();
    for program in &programs {
        let site = Site::build(options)?;
        notes = site.cage.left_out.iter().map(|sentence| format!("**Left out.** {sentence}\n\n")).collect();
        let row = measure_one(options, program, &site, &behind)?;
        eprintln!("cache-disks: {row:?}");
        rows.push(row);
    }
    let hot = |shares: &[Share]| shares[0].hot;
    let others = |row: &Row| (row.saturated[0].cold, row.hung[0].cold);
    let of = |got: Option<Got>, figure: fn(&Got) -> f64| got.map_or(f64::NAN, |got| figure(&got));
    let table = report::table_of(
        &rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("hot, p99 ms: alone", &|row| format!("{:.1}", hot(&row.alone).p99_ms)),
            ("disks saturated", &|row| format!("{:.1}", hot(&row.saturated).p99_ms)),
            ("one disk hangs", &|row| format!("{:.1}", hot(&row.hung).p99_ms)),
            ("cold, another disk, requests/s: before", &|row| {
                format!("{:.1}", of(others(row).0, |got| got.requests_per_second))
            }),
            ("while one hangs", &|row| format!("{:.1}", of(others(row).1, |got| got.requests_per_second))),
            ("p99 ms: before", &|row| format!("{:.0}", of(others(row).0, |got| got.p99_ms))),
            ("while one hangs ", &|row| format!("{:.0}", of(others(row).1, |got| got.p99_ms))),
            ("share of the disk that hangs, requests/s", &|row| {
                format!("{:.1}", of(row.hung[DISKS - 1].cold, |got| got.requests_per_second))
            }),
            ("p50 ms", &|row| format!("{:.0}", of(row.hung[DISKS - 1].cold, |got| got.p50_ms))),
            ("longest ms", &|row| format!("{:.0}", of(row.hung[DISKS - 1].cold, |got| got.max_ms))),
            ("its hot object, p99 ms", &|row| format!("{:.1}", row.hung[DISKS - 1].hot.p99_ms)),
            ("stalls logged", &|row| row.stalls.len().to_string()),
        ],
    );
    let body = format!(
        "{notes}The article's three disks, each with a cache and a pool of 16 threads. Disks are loop devices, held to \
         {} MiB/s each; a disk that hangs gives a byte a second, for {} s. {OBJECTS} objects of 1 MiB on each, {} MiB of \
         memory for server and page cache; on each disk {COLD_CONNECTIONS} connections ask for any object and \
         {HOT_CONNECTIONS} for one that is in memory. {} workers.\n\n{table}",
        DISK_BYTES_PER_SECOND >> 20,
        (WARM_UP + hang_time(options)).as_secs(),
        MEMORY_BYTES >> 20,
        options.experiment.workers
    );
    Ok((Document::new("cache-disks", "Three disks with a cache each", &programs, &body, &rows)?, true))
}

fn hang_time(options: &Options) -> Duration {
    options.run_time.max(Duration::from_secs(28))
}

impl Site {
    fn build(options: &Options) -> Result<Site, String> {
        let directory = options.experiment.directory.join(format!("gale-bench-disks-{}", std::process::id()));
        std::fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        let mut site = Site { cage: Cage::default(), disks: Vec::new(), devices: Vec::new(), directory };
        let bytes = (OBJECTS * OBJECT_BYTES) as u64 * 3 / 2;
        for number in 1..=DISKS {
            let disk = SmallDisk::named(&site.directory, &format!("disk{number}"), bytes)?;
            site.devices.extend(confine::device_of(&disk.mount_point));
            site.disks.push(disk);
        }
        site.cage = Cage::build(MEMORY_BYTES, &site.devices, DISK_BYTES_PER_SECOND);
        Ok(site)
    }

    fn setting(&self, options: &Options, behind: u16) -> Setting {
        let pools: String = (1..=DISKS).map(|number| format!("thread_pool pool_{number} threads=16;\n")).collect();
        let paths: String = (1..)
            .zip(&self.disks)
            .map(|(number, disk)| {
                format!(
                    "proxy_cache_path {}/cache levels=1:2 keys_zone=cache_{number}:64m max_size=100g inactive=10h \
                     use_temp_path=off;\n",
                    disk.mount_point.display()
                )
            })
            .collect();
        Setting {
            workers: options.experiment.workers,
            under: Some(self.cage.words()),
            blocks: pools,
            // By the name and not by a hash, so that the clients know whose share they ask for.
            http: format!("{paths}map $uri $disk {{ ~^/disk1/ 1; ~^/disk2/ 2; default 3; }}"),
            server: format!(
                "location /disk {{ proxy_pass http://127.0.0.1:{behind}; proxy_cache_key $request_uri; \
                 proxy_cache cache_$disk; proxy_cache_valid 200 10h; aio threads=pool_$disk; sendfile on; \
                 sendfile_max_chunk 512k; }}"
            ),
            ..Setting::default()
        }
    }
}

fn measure_one(options: &Options, program: &Program, site: &Site, behind: &Rc<Behind>) -> Result<Row, String> {
    let server = program.start(site.setting(options, behind.port))?;
    fill(&server)?;
    let alone = run(&server, options.run_time, false)?;
    let saturated = run(&server, options.run_time, true)?;
    let hung_device = *site.devices.last().ok_or("the disks are no devices")?;
    site.cage.hold_reads(hung_device, HUNG)?;
    let hung = run(&server, hang_time(options), true);
    site.cage.hold_reads(hung_device, DISK_BYTES_PER_SECOND)?;
    Ok(Row { server: program.label.clone(), alone, saturated, hung: hung?, stalls: stalls(&server.error_log()) })
}

/// Asks for each object once, so that all are stored.
fn fill(server: &Running) -> Result<(), String> {
    let (ends, mut next) = (AtomicBool::new(false), 0);
    let mut ask = |_: usize| {
        if next + 1 >= DISKS * OBJECTS {
            ends.store(true, Ordering::Relaxed);
        }
        let request = get(&path(next % DISKS, next / DISKS));
        next = (next + 1).min(DISKS * OBJECTS - 1);
        request
    };
    let swarm = Swarm {
        address: &server.address,
        connections: 8,
        request: &mut ask,
        warm_up: Duration::ZERO,
        run_time: Duration::from_secs(300),
        ends: &ends,
        bytes_per_second: None,
        certificate: None,
    };
    let got = swarm.run()?;
    if got.errors > 0 { Err(format!("the caches were not filled: {got:?}")) } else { Ok(()) }
}

fn path(disk: usize, object: usize) -> String {
    format!("/disk{}/{object}", disk + 1)
}

/// On every disk clients of one object, and of any if they shall.
fn run(server: &Running, run_time: Duration, with_cold: bool) -> Result<Vec<Share>, String> {
    let ends = AtomicBool::new(false);
    let (address, ends) = (server.address.as_str(), &ends);
    std::thread::scope(|scope| {
        let swarm = |connections: usize, mut request: Box<dyn FnMut(usize) -> String + Send>| {
            scope.spawn(move || {
                let request = &mut *request;
                Swarm {
                    address,
                    connections,
                    request,
                    warm_up: WARM_UP,
                    run_time,
                    ends,
                    bytes_per_second: None,
                    certificate: None,
                }
                .run()
            })
        };
        let shares: Vec<_> = (0..DISKS)
            .map(|disk| {
                let mut random = Random(0x2545_f491_4f6c_dd1d + disk as u64);
                let any = Box::new(move |_: usize| get(&path(disk, 1 + random.below(OBJECTS - 1))));
                let cold = with_cold.then(|| swarm(COLD_CONNECTIONS, any));
                (swarm(HOT_CONNECTIONS, Box::new(move |_: usize| get(&path(disk, 0)))), cold)
            })
            .collect();
        shares
            .into_iter()
            .map(|(hot, cold)| {
                let ended = "a client does not panic";
                let cold = cold.map(|cold| cold.join().expect(ended)).transpose()?;
                Ok(Share { hot: hot.join().expect(ended)?, cold })
            })
            .collect()
    })
}
