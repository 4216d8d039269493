//! waits: waits of event loops in the kernel, classified by the stacks of their threads.
//!
//! A loop must not wait for a disk (state D). If it is in that state in every sample for over 20 ms, the wait is
//! classified by the kernel functions in its stack (`/proc/PID/task/TID/stack`, readable only for root).

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::is_event_loop;
use crate::process::{Process, thread_stack};

/// Interval of samples: short enough to see a wait of [`WORTH`] several times.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Shorter waits are not reported.
const WORTH: Duration = Duration::from_millis(20);

/// Kinds of waits, with functions that occur only in stacks of that kind. The first match applies.
const KINDS: &[(&str, &[&str])] = &[
    (
        "reclaim",
        &["try_to_free_", "shrink_", "mem_cgroup_handle_over_high", "balance_dirty_pages", "__alloc_pages_slow"],
    ),
    ("time of access", &["touch_atime", "jbd2_"]),
    (
        "read-ahead submission",
        &["blk_mq_get_tag", "blk_mq_submit_bio", "rq_qos_", "blk_throtl", "wbt_wait", "submit_bio"],
    ),
    ("stale belief", &["folio_wait_bit", "filemap_", "folio_lock", "splice_"]),
    ("opening", &["path_openat", "lookup_", "walk_component"]),
];

#[derive(Debug, Default, Serialize)]
pub struct Waits {
    pub count: u64,
    pub longest_ms: u64,
    /// Stack of the longest one, if it could be read.
    stack: String,
}

/// Returns the kind of a wait with this stack, which is in the kernel's format.
fn kind_of(stack: &str) -> String {
    let has = |functions: &[&str]| functions.iter().any(|function| stack.contains(function));
    let kind = KINDS.iter().find(|(_, functions)| has(functions)).map(|(kind, _)| (*kind).to_owned());
    let first =
        || stack.lines().next().and_then(|line| line.split(['+', ' ']).nth(1)).unwrap_or("not to be seen").to_owned();
    kind.unwrap_or_else(first)
}

/// Returns waits of over 20 ms in the event loops below `root` until `ends`, by kind.
pub fn watch(root: Process, ends: &AtomicBool) -> BTreeMap<String, Waits> {
    /// A thread that was in state D in the last sample.
    struct Waiting {
        since: Instant,
        stack: String,
    }
    let processes = root.tree();
    let mut waiting: HashMap<u32, Waiting> = HashMap::new();
    let mut waits: BTreeMap<String, Waits> = BTreeMap::new();
    let mut end = |Waiting { since, stack }: Waiting, now: Instant| {
        let took = now - since;
        if took > WORTH {
            let waits = waits.entry(kind_of(&stack)).or_default();
            waits.count += 1;
            let milliseconds = took.as_millis() as u64;
            if milliseconds > waits.longest_ms {
                (waits.longest_ms, waits.stack) = (milliseconds, stack);
            }
        }
    };
    while !ends.load(Ordering::Relaxed) {
        let now = Instant::now();
        for &process in &processes {
            for (thread, name, state) in process.thread_states() {
                if !is_event_loop(process, root, &name) {
                    continue;
                }
                if state != 'D' {
                    waiting.remove(&thread).into_iter().for_each(|wait| end(wait, now));
                    continue;
                }
                let wait = waiting.entry(thread).or_insert_with(|| Waiting { since: now, stack: String::new() });
                if wait.stack.is_empty() {
                    wait.stack = thread_stack(process, thread);
                }
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let now = Instant::now();
    waiting.into_values().for_each(|wait| end(wait, now));
    waits
}

pub fn together<'a>(runs: impl IntoIterator<Item = &'a BTreeMap<String, Waits>>) -> BTreeMap<String, Waits> {
    let mut all: BTreeMap<String, Waits> = BTreeMap::new();
    for (kind, waits) in runs.into_iter().flatten() {
        let sum = all.entry(kind.clone()).or_default();
        sum.count += waits.count;
        sum.longest_ms = sum.longest_ms.max(waits.longest_ms);
    }
    all
}

/// Formats the waits for a table: number of each kind, and the longest.
pub fn text(waits: &BTreeMap<String, Waits>) -> String {
    if waits.is_empty() {
        return "none".to_owned();
    }
    let of_kind = |(kind, waits): (&String, &Waits)| format!("{kind}: {}, up to {} ms", waits.count, waits.longest_ms);
    waits.iter().map(of_kind).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_is_named_by_the_kernel_s_function() {
        let sendfile = "[<0>] folio_wait_bit_common+0x11d/0x320\n[<0>] filemap_splice_read+0x13b/0x330\n\
                        [<0>] splice_direct_to_actor+0xb4/0x250\n[<0>] do_sendfile+0x37c/0x480\n";
        assert_eq!(kind_of(sendfile), "stale belief");
        let reclaim = "[<0>] shrink_node+0x1/0x2\n[<0>] try_to_free_mem_cgroup_pages+0x1/0x2\n\
                       [<0>] filemap_add_folio+0x1/0x2\n[<0>] page_cache_ra_unbounded+0x1/0x2\n";
        assert_eq!(kind_of(reclaim), "reclaim");
        let submission =
            "[<0>] blk_mq_get_tag+0x1/0x2\n[<0>] page_cache_ra_unbounded+0x1/0x2\n[<0>] filemap_get_pages+0x1/0x2\n";
        assert_eq!(kind_of(submission), "read-ahead submission");
        assert_eq!(kind_of("[<0>] do_something+0x1/0x2\n"), "do_something");
        assert_eq!(kind_of(""), "not to be seen");
    }
}
