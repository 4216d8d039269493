//! The devices that files lie on, for a status page: how each behaves, what is being read from it, and what threads of
//! pools do for it. Nothing here asks the device for anything, so that one that hangs is told of like any other.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::fs::{major, minor};

use super::file_system::PAGE_CACHE;
use super::mounts::{self, Mounted};
use super::page_cache::DeviceReads;
use crate::pool::{PoolDevice, pools};
use crate::time::now_anywhere;

/// A device that something was read from or asked of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceStatus {
    /// As the kernel writes it: `8:1`.
    pub number: String,
    /// What the mount table says of it, if it is there.
    pub mounted: Option<Mounted>,
    /// Its condition, one of [`DeviceStatus::CONDITIONS`].
    pub condition: &'static str,
    /// Pieces that are being read because they were not in memory.
    pub reads_in_flight: u32,
    /// Such pieces that were read, and how long that took together.
    pub reads: u64,
    /// See `reads`.
    pub read_time: Duration,
    /// Tasks of pools that run for it: reads, opens, writes.
    pub running: usize,
    /// Those that wait for a thread.
    pub waiting: usize,
}

/// The devices of files, by number. (Some share their figures: those whose numbers have the same hash. The figures are
/// then under the number of the first.)
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
