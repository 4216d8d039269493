//! timetable: requests at times fixed in advance, independent of earlier responses.
//!
//! Each file has its own connection, so a request waits only for the previous response of the same file. Latency counts
//! from the time at which the request was due. Invariant: every request that was due counts; without a response
//! [`GRACE`] after the end it counts with the time waited.
//!
//! All connections share one thread with real-time priority, which discards bodies without copying them. To show that
//! the thread was not the limit, its lateness on free connections and its CPU time are measured.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use gale_base::histogram::FineHistogram;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime, timerfd_create,
    timerfd_settime,
};
use serde::Serialize;

use super::swarm::{Got, HEAD_MAX, Peer, TURN_MAX, Tally, Whole, ms};
use crate::burst::take_priority;

/// Time for the last responses after the last request was due.
const GRACE: Duration = Duration::from_secs(10);
/// Longest sleep before the thread checks the clock.
const SLEEP_MAX: Duration = Duration::from_millis(50);
/// Event number of the timer, distinct from those of connections.
const TIMER: u64 = u64::MAX;

/// Requests at equal intervals, for several files in turn.
#[derive(Debug, Clone)]
pub struct Series {
    pub requests: Vec<String>,
    /// Time of the first request, from the beginning.
    pub first: Duration,
    pub step: Duration,
}

impl Series {
    /// Returns the time at which a request is due, from the beginning.
    pub fn due(&self, number: u32) -> Duration {
        self.first + self.step * number
    }

    /// Returns the index of a request's file.
    fn file(&self, number: u32) -> usize {
        number as usize % self.requests.len()
    }
}

/// A timetable with its connections open.
pub struct Timetable {
    poll: OwnedFd,
    /// A timer, because the time limits of epoll have a resolution of milliseconds.
    timer: OwnedFd,
    series: Vec<Series>,
    /// Connections of the first series' files, then of the next.
    connections: Vec<FileConnection>,
}

struct FileConnection {
    peer: Peer,
    series: usize,
    request: String,
    /// Due times of requests that wait for the previous response.
    waiting: VecDeque<Instant>,
}

/// Results of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// In the order of the series.
    pub series: Vec<SeriesGot>,
    pub client: Punctuality,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct SeriesGot {
    #[serde(flatten)]
    pub got: Got,
    /// Requests due in the counted time.
    pub requests: u64,
    /// Of these, requests without a complete response at the end.
    pub unfinished: u64,
}

/// Figures that show if the client was the limit.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Punctuality {
    /// Delay between the time when a request was due and its sending, on a free connection.
    pub late_p99_ms: f64,
    pub late_max_ms: f64,
    /// CPU time of the client's thread as a share of one core.
    pub share_of_core: f64,
}

impl Timetable {
    pub fn connect(address: &str, series: Vec<Series>) -> Result<Timetable, String> {
        let fault = |error: std::io::Error| format!("timetable: {error}");
        let address: SocketAddr = address.parse().map_err(|_| "timetable: no address".to_owned())?;
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| fault(error.into()))?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            .map_err(|error| fault(error.into()))?;
        epoll::add(&poll, &timer, epoll::EventData::new_u64(TIMER), epoll::EventFlags::IN)
            .map_err(|error| fault(error.into()))?;
        let mut connections: Vec<FileConnection> = Vec::new();
        for (number, one) in series.iter().enumerate() {
            for request in &one.requests {
                let mut peer = Peer::connect(&address, None, false).map_err(fault)?;
                peer.is_idle = true;
                let data = epoll::EventData::new_u64(connections.len() as u64);
                epoll::add(&poll, &peer.stream, data, epoll::EventFlags::IN).map_err(|error| fault(error.into()))?;
                let (request, waiting) = (request.clone(), VecDeque::new());
                connections.push(FileConnection { peer, series: number, request, waiting });
            }
        }
        Ok(Timetable { poll, timer, series, connections })
    }

    /// Runs for the sum of both times. Requests due in the warm-up do not count.
    pub fn run(mut self, warm_up: Duration, run_time: Duration) -> Result<Outcome, String> {
        take_priority();
        let cpu_time_before = cpu_time_of_this_thread();
        let begun = Instant::now();
        let (counts_from, end) = (begun + warm_up, begun + warm_up + run_time);
        let mut tallies: Vec<Tally> = self.series.iter().map(|_| Tally::from(counts_from)).collect();
        let mut next = vec![0u32; self.series.len()];
        let lateness = FineHistogram::default();
        let mut events = Vec::with_capacity(256);
        let mut scratch = vec![0; HEAD_MAX];
        loop {
            let next_due = self.send_due_requests(begun, end, &mut next, |due| {
                if due >= counts_from {
                    lateness.record(due.elapsed());
                }
            });
            let now = Instant::now();
            if next_due.is_none() && (now >= end + GRACE || self.connections.iter().all(FileConnection::is_free)) {
                break;
            }
            let sleep = next_due.map_or(SLEEP_MAX, |due| due.saturating_duration_since(now).min(SLEEP_MAX));
            self.wait(sleep, &mut events).map_err(|error| format!("timetable: {error}"))?;
            for event in events.drain(..).filter(|event| event.data.u64() != TIMER) {
                let connection = &mut self.connections[event.data.u64() as usize];
                connection.receive(&self.poll, &mut scratch, &mut tallies[connection.series], counts_from);
            }
        }
        let elapsed = begun.elapsed();
        let mut unfinished = vec![0; self.series.len()];
        for connection in &self.connections {
            for due in connection.open_since().filter(|&due| due >= counts_from) {
                unfinished[connection.series] += 1;
                tallies[connection.series].record(due.elapsed());
            }
        }
        let got = |(tally, unfinished): (&Tally, u64)| SeriesGot {
            got: tally.got(run_time.as_secs_f64()),
            requests: tally.requests,
            unfinished,
        };
        let lateness = lateness.snapshot();
        let client = Punctuality {
            late_p99_ms: ms(lateness.quantile(0.99)),
            late_max_ms: ms(lateness.max()),
            share_of_core: (cpu_time_of_this_thread() - cpu_time_before).as_secs_f64() / elapsed.as_secs_f64(),
        };
        Ok(Outcome { series: tallies.iter().zip(unfinished).map(got).collect(), client })
    }

    /// Waits for responses, at most for `sleep`.
    fn wait(&self, sleep: Duration, events: &mut Vec<epoll::Event>) -> rustix::io::Result<()> {
        // Zero would disarm the timer.
        let sleep = Timespec { tv_sec: 0, tv_nsec: sleep.subsec_nanos().max(1).into() };
        let once = Itimerspec { it_interval: Timespec::default(), it_value: sleep };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        match epoll::wait(&self.poll, spare_capacity(events), None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sends the requests that are due on free connections, and calls `asked` with their due times; on other
    /// connections they wait. Returns the time of the next request, or `None` after the last one.
    fn send_due_requests(
        &mut self,
        begun: Instant,
        end: Instant,
        next: &mut [u32],
        asked: impl Fn(Instant),
    ) -> Option<Instant> {
        let mut next_due = None;
        let mut first_connection = 0;
        for (series, next) in self.series.iter().zip(next) {
            loop {
                let due = begun + series.due(*next);
                if due >= end {
                    break;
                }
                if due > Instant::now() {
                    next_due = Some(next_due.map_or(due, |other: Instant| other.min(due)));
                    break;
                }
                let connection = &mut self.connections[first_connection + series.file(*next)];
                let is_free = connection.is_free();
                connection.waiting.push_back(due);
                if is_free {
                    connection.ask_next();
                    asked(due);
                }
                *next += 1;
            }
            first_connection += series.requests.len();
        }
        next_due
    }
}

impl FileConnection {
    /// Returns true if a request can be sent. A broken connection is never free: its requests wait until the end.
    fn is_free(&self) -> bool {
        self.peer.is_idle && !self.peer.has_ended && self.waiting.is_empty()
    }

    fn ask_next(&mut self) {
        if let Some(due) = self.waiting.pop_front() {
            self.peer.ask(&self.request, due);
        }
    }

    fn receive(&mut self, poll: &OwnedFd, scratch: &mut [u8], tally: &mut Tally, counts_from: Instant) {
        match self.peer.receive(scratch, TURN_MAX, tally) {
            Ok(None) => {}
            Ok(Some(Whole)) => {
                if self.peer.asked >= counts_from {
                    tally.record(self.peer.asked.elapsed());
                }
                self.ask_next();
            }
            Err(()) => {
                tally.errors += 1;
                self.peer.has_ended = true;
                // It may be unregistered already.
                let _ = epoll::delete(poll, &self.peer.stream);
            }
        }
    }

    /// Returns the start times of requests without a response.
    fn open_since(&self) -> impl Iterator<Item = Instant> + '_ {
        let asked = (!self.peer.is_idle).then_some(self.peer.asked);
        asked.into_iter().chain(self.waiting.iter().copied())
    }
}

fn cpu_time_of_this_thread() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    fn series(step: Duration) -> Series {
        Series { requests: vec!["GET /a\r\n\r\n".to_owned()], first: Duration::ZERO, step }
    }

    #[test]
    fn files_take_turns_at_equal_intervals() {
        let of_file = |name: &str| name.to_owned();
        let requests = ["a", "b", "c"].map(of_file).to_vec();
        let (first, step) = (Duration::from_millis(7), Duration::from_millis(10));
        let series = Series { requests, first, step };
        let dues: Vec<(u128, usize)> = (0..4).map(|n| (series.due(n).as_millis(), series.file(n))).collect();
        assert_eq!(dues, [(7, 0), (17, 1), (27, 2), (37, 0)]);
    }

    #[test]
    fn requests_that_wait_for_an_answer_count_from_the_moment_when_they_were_due() {
        const STEP: Duration = Duration::from_millis(1);
        const REQUESTS: u32 = 20;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 64];
            let mut asked = 0;
            let begun = Instant::now();
            // The first response comes when all other requests are due.
            while asked < REQUESTS {
                let received = stream.read(&mut request).unwrap();
                assert_eq!(&request[..received], b"GET /a\r\n\r\n", "one at a time");
                std::thread::sleep((STEP * REQUESTS).saturating_sub(begun.elapsed()));
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
                asked += 1;
            }
        });
        let timetable = Timetable::connect(&address, vec![series(STEP)]).unwrap();
        let outcome = timetable.run(Duration::ZERO, STEP * REQUESTS).unwrap();
        server.join().unwrap();
        let SeriesGot { got, requests, unfinished } = outcome.series[0];
        assert_eq!((requests, unfinished, got.errors), (REQUESTS.into(), 0, 0));
        // Requests are due 0 to 19 ms after the beginning, and answered 20 ms after it or later.
        assert!(got.max_ms >= 18.0 && got.mean_ms >= 8.0, "{got:?}");
    }
}
