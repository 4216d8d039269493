//! memory: user memory of processes, and memory of the kernel.
//!
//! The kernel does not attribute its memory to processes, so it is measured for the whole machine, which must otherwise
//! be idle.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::process::Process;

/// A reading of some processes. In PSS, pages that they share count once.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Memory {
    pub processes: usize,
    pub descriptors: usize,
    pub rss_kib: u64,
    pub pss_kib: u64,
    pub private_dirty_kib: u64,
}

impl Memory {
    pub fn read(processes: &[Process]) -> Memory {
        let mut memory = Memory::default();
        for process in processes {
            let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", process.id)).unwrap_or_default();
            memory.rss_kib += field(&rollup, "Rss:");
            memory.pss_kib += field(&rollup, "Pss:");
            memory.private_dirty_kib += field(&rollup, "Private_Dirty:");
            memory.descriptors += process.descriptors();
            memory.processes += 1;
        }
        memory
    }

    /// Growth of the PSS since `before`; 0.1 means 10 %.
    pub fn growth_since(&self, before: &Memory) -> f64 {
        self.pss_kib as f64 / before.pss_kib.max(1) as f64 - 1.0
    }
}

/// Returns the maximum PSS of a server's processes in KiB, until `is_over`.
pub fn most_pss_kib(root: Process, is_over: &AtomicBool) -> u64 {
    const INTERVAL: Duration = Duration::from_millis(250);
    let mut most = 0;
    while !is_over.load(Ordering::Relaxed) {
        most = most.max(Memory::read(&root.tree()).pss_kib);
        std::thread::sleep(INTERVAL);
    }
    most
}

/// Memory of the kernel's objects in KiB: slabs, stacks, page tables, per-core memory. Read when it has settled, since
/// freed objects wait for other cores.
pub fn kernel_kib() -> u64 {
    const PAUSE: Duration = Duration::from_millis(100);
    const TIME_LIMIT: Duration = Duration::from_secs(3);
    const REST_KIB: u64 = 64;
    let deadline = Instant::now() + TIME_LIMIT;
    let mut last = kernel_kib_now();
    loop {
        std::thread::sleep(PAUSE);
        let now = kernel_kib_now();
        if now.abs_diff(last) <= REST_KIB || Instant::now() >= deadline {
            return now;
        }
        last = now;
    }
}

fn kernel_kib_now() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let slabs = objects_kib().unwrap_or_else(|| field(&meminfo, "Slab:"));
    slabs + ["KernelStack:", "PageTables:", "Percpu:"].iter().map(|name| field(&meminfo, name)).sum::<u64>()
}

/// Memory of objects in use in slabs; `None` if the kernel does not report it, or only to root. The size of the slabs
/// themselves depends on what was there before, because partly free slabs serve new objects first. (Whole pages are not
/// included: descriptor tables, rings.)
fn objects_kib() -> Option<u64> {
    // Objects cached by a core count as in use, until the caches are shrunk.
    for cache in fs::read_dir("/sys/kernel/slab").ok()?.flatten() {
        let _ = fs::write(cache.path().join("shrink"), "1");
    }
    Some(objects_in(&fs::read_to_string("/proc/slabinfo").ok()?))
}

/// Parses slabinfo(5). Returns KiB: an object takes its share of a slab's pages.
fn objects_in(slabinfo: &str) -> u64 {
    const PAGE_BYTES: u64 = 4096;
    let bytes = slabinfo.lines().filter_map(|line| {
        let mut columns = line.split_whitespace().skip(1).map_while(|column| column.parse::<u64>().ok());
        let (active, _, _, per_slab, pages) =
            (columns.next()?, columns.next()?, columns.next()?, columns.next()?, columns.next()?);
        Some(active * pages * PAGE_BYTES / per_slab.max(1))
    });
    bytes.sum::<u64>() / 1024
}

fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let rollup = "7f00-7fff ---p [rollup]\nRss:   1200 kB\nPss:    800 kB\nPss_Dirty:  700 kB\n";
        assert_eq!((field(rollup, "Rss:"), field(rollup, "Pss:"), field(rollup, "Swap:")), (1200, 800, 0));
    }

    #[test]
    fn objects_in_use_are_counted_with_their_share_of_a_slab() {
        let slabinfo = "slabinfo - version: 2.1\n\
            # name <active_objs> <num_objs> <objsize> <objperslab> <pagesperslab> : tunables <limit>\n\
            TCP      1300   1400   2368   13    8 : tunables    0    0    0 : slabdata    108    108      0\n\
            ep_head   512   1024     16  256    1 : tunables    0    0    0 : slabdata      4      4      0\n";
        assert_eq!(objects_in(slabinfo), 100 * 32 + 2 * 4);
    }

    #[test]
    fn the_kernel_has_memory() {
        assert!(kernel_kib() > 0);
    }
}
