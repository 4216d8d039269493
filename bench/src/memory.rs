//! memory: resident memory of a server, all processes together, and its open descriptors.

use std::fs;

use serde::Serialize;

use crate::process::Process;

/// One reading. PSS counts a page that several processes share once.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Memory {
    pub processes: usize,
    pub descriptors: usize,
    pub rss_kib: u64,
    pub pss_kib: u64,
}

impl Memory {
    pub fn read(processes: &[Process]) -> Memory {
        let mut memory = Memory::default();
        for process in processes {
            let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", process.id)).unwrap_or_default();
            memory.rss_kib += field(&rollup, "Rss:");
            memory.pss_kib += field(&rollup, "Pss:");
            memory.descriptors += process.descriptors();
            memory.processes += 1;
        }
        memory
    }

    /// Growth of the PSS since `before`, 0.1 for 10 %.
    pub fn growth_since(&self, before: &Memory) -> f64 {
        self.pss_kib as f64 / before.pss_kib.max(1) as f64 - 1.0
    }
}

fn field(rollup: &str, name: &str) -> u64 {
    let line = rollup.lines().find_map(|line| line.strip_prefix(name));
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
}
