//! Devices of files, for a status page: condition of each, its reads, and its pool tasks. Nothing here accesses a
//! device, so one that hangs is reported like any other.

use std::collections::BTreeMap;
use std::time::Duration;

use gale_runtime::{PoolDevice, now_anywhere, pools};
use rustix::fs::{major, minor};

use super::file_system::PAGE_CACHE;
use super::mounts::{self, Mounted};
use super::page_cache::DeviceReads;

/// A device that was used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceStatus {
    /// As the kernel prints it: `8:1`.
    pub number: String,
    /// Its entry in the mount table, if there is one.
    pub mounted: Option<Mounted>,
    /// Its condition, one of [`DeviceStatus::CONDITIONS`].
    pub condition: &'static str,
    /// Reads in flight of pieces that were not in memory.
    pub reads_in_flight: u32,
    /// Completed reads of such pieces, and their total time.
    pub reads: u64,
    /// See `reads`.
    pub read_time: Duration,
    /// Pool tasks running for it: reads, opens, writes.
    pub running: usize,
    /// Pool tasks waiting for a thread.
    pub waiting: usize,
}

/// The devices of files, by number. (Devices whose numbers have the same hash share their counters, which are reported
/// under the number of the first.)
pub fn devices() -> Vec<DeviceStatus> {
    let mut devices: BTreeMap<u64, DeviceStatus> = BTreeMap::new();
    for (number, DeviceReads { condition, in_flight, done, time }) in PAGE_CACHE.read_figures(now_anywhere()) {
        let device = devices.entry(number).or_insert_with(|| DeviceStatus::new(number));
        (device.condition, device.reads_in_flight, device.reads, device.read_time) = (condition, in_flight, done, time);
    }
    for PoolDevice { number, running, waiting } in pools().into_iter().flat_map(|pool| pool.devices) {
        let device = devices.entry(number).or_insert_with(|| DeviceStatus::new(number));
        (device.running, device.waiting) = (device.running + running, device.waiting + waiting);
    }
    devices.into_values().collect()
}

impl DeviceStatus {
    /// Values of `condition`.
    pub const CONDITIONS: [&'static str; 3] = ["healthy", "busy", "not answering"];

    fn new(number: u64) -> DeviceStatus {
        DeviceStatus {
            number: format!("{}:{}", major(number), minor(number)),
            mounted: mounts::name_of(number),
            condition: "healthy",
            reads_in_flight: 0,
            reads: 0,
            read_time: Duration::ZERO,
            running: 0,
            waiting: 0,
        }
    }
}
