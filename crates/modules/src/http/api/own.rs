//! `gale/…`: objects that nginx does not have: loops and their stalls, accept queues, thread pools, devices, memory,
//! and delivery of files. Nothing here blocks, neither on a loop nor on a device that hangs.

use std::time::Duration;

use gale_base::histogram::Snapshot;
use gale_files::{DeviceStatus, Rung};
use gale_runtime::stall::StallKind;
use gale_runtime::watchdog::{ListenerStatus, Stall};
use gale_runtime::{PoolStatus, Remote, watchdog};
use gale_stream::session::loss::Loss;
use serde_json::{Map, Value, json};

use super::tree::{View, millis};

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Returns times in microseconds: quantiles, and a histogram with the number of times below each bound.
fn times(times: &Snapshot) -> Value {
    let name = |bound: Option<Duration>| {
        bound.map_or("inf".to_owned(), |bound| {
            // Bounds are powers of two of nanoseconds.
            format!("{}.{:03}", bound.as_micros(), bound.subsec_nanos() % 1000)
        })
    };
    let buckets: Map<String, Value> = times.cumulative().map(|(bound, count)| (name(bound), count.into())).collect();
    json!({
        "p50": micros(times.quantile(0.5)),
        "p99": micros(times.quantile(0.99)),
        "p999": micros(times.quantile(0.999)),
        "count": times.count(),
        "sum": micros(times.sum()),
        "buckets": buckets,
    })
}

/// Returns the turns, stalls and leases of each loop.
pub(super) fn loops() -> Value {
    let mut loops = watchdog::workers();
    loops.sort_by_key(|(worker, _)| *worker);
    let describe = |(worker, remote): &(usize, Remote)| {
        let turns = remote.turns();
        let filed = |kind: StallKind| {
            let filed = turns.filed(kind);
            (kind.to_string(), json!({ "count": filed.count, "time": millis(filed.time) }))
        };
        json!({
            "worker": worker,
            "turns": turns.count(),
            "busy": millis(turns.busy()),
            "longest": micros(turns.longest()),
            "turn_times": times(&turns.times()),
            "stalls": turns.stalls(),
            "stalls_by_kind": StallKind::ALL.into_iter().map(filed).collect::<Map<String, Value>>(),
            "leased": remote.leased_bytes(),
            "leased_max": remote.leased_bytes_max(),
        })
    };
    loops.iter().map(describe).collect()
}

/// Returns the last stalls of all loops, the latest first.
pub(super) fn stalls(view: &View) -> Value {
    let describe = |stall: Stall| {
        json!({
            "worker": stall.worker,
            "began": view.wall_of(stall.began),
            "kind": stall.kind.to_string(),
            "time": millis(stall.duration),
            "is_over": stall.is_over,
            "task": stall.at,
        })
    };
    watchdog::last_stalls().into_iter().rev().map(describe).collect()
}

/// Returns the number of connections in the accept queue of each listening socket.
pub(super) fn listeners() -> Value {
    let describe = |listener: ListenerStatus| {
        let ListenerStatus { address, worker, waiting, waiting_max } = listener;
        let mut described = json!({ "address": address.to_string(), "waiting": waiting, "waiting_max": waiting_max });
        worker.into_iter().for_each(|worker| described["worker"] = worker.into());
        described
    };
    watchdog::listeners().into_iter().map(describe).collect()
}

/// Returns the thread pools, which run everything that would block a loop.
pub(super) fn pools() -> Value {
    let describe = |pool: &PoolStatus| {
        let counters = &pool.counters;
        json!({
            "name": &*pool.name,
            "threads_max": pool.threads_max,
            "queue_max": pool.queue_max,
            "threads": counters.threads,
            "running": counters.running,
            "waiting": counters.waiting,
            "completed": counters.completed,
            "panicked": counters.panicked,
            "cancelled": counters.cancelled,
            "refused": counters.refused,
            "thread_failures": counters.thread_failures,
            "wait_times": times(&pool.wait_times),
            "run_times": times(&pool.run_times),
        })
    };
    gale_runtime::pools().iter().map(describe).collect()
}

/// Returns the devices of the served files.
pub(super) fn devices() -> Value {
    let describe = |device: DeviceStatus| {
        let mut described = json!({
            "device": device.number,
            "condition": device.condition,
            "reads": {
                "in_flight": device.reads_in_flight,
                "total": device.reads,
                "time": millis(device.read_time),
            },
            "tasks": { "running": device.running, "waiting": device.waiting },
        });
        if let Some(mounted) = device.mounted {
            described["name"] = Value::from(&*mounted.source);
            described["mounted_on"] = Value::from(&*mounted.point);
        }
        described
    };
    gale_files::devices().into_iter().map(describe).collect()
}

/// Returns the memory passed between loops, and the leases of all loops.
pub(super) fn memory() -> Value {
    let loops = watchdog::workers();
    json!({
        "shared": gale_runtime::shared_bytes(),
        "shared_max": gale_runtime::shared_bytes_max(),
        "leased": loops.iter().map(|(_, remote)| remote.leased_bytes()).sum::<usize>(),
        "leased_max": loops.iter().map(|(_, remote)| remote.leased_bytes_max()).sum::<usize>(),
    })
}

/// Returns how pieces of files were delivered, and the decisions of the page-cache policy.
pub(super) fn files() -> Value {
    let counters = gale_files::file_counters();
    let rungs: Map<String, Value> = Rung::ALL
        .iter()
        .zip(counters.pieces.iter().zip(counters.bytes))
        .map(|(rung, (pieces, bytes))| (rung.name().to_owned(), json!({ "pieces": pieces, "bytes": bytes })))
        .collect();
    json!({
        "rungs": rungs,
        "probe_hits": counters.probe_hits,
        "probe_misses": counters.probe_misses,
        "unlooked": counters.unlooked,
        "pool_hits": counters.pool_hits,
        "mispredictions": counters.mispredictions,
        "questions": counters.questions,
        "resident_answers": counters.resident_answers,
        "shared_reads": counters.shared_reads,
    })
}

/// Returns the datagrams lost in stream, by reason.
pub(super) fn datagrams() -> Value {
    let lost: Map<String, Value> = Loss::ALL.iter().map(|loss| (loss.name().to_owned(), loss.count().into())).collect();
    json!({ "lost": lost })
}
