//! outcome: the counts of an experiment, and its verdict.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::exchange::Reply;
use crate::client::load::Totals;
use crate::floods::Waits;
use crate::servers::{Kind, Program};

/// The counts of one server.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Requests, or attempts at one.
    pub requests: u64,
    /// Requests that the fault itself ended, with an error of the server or of the connection, as it may.
    pub ended_by_fault: u64,
    /// Requests that should have been answered.
    pub lost: u64,
    /// Answers with bytes that are not the right ones.
    pub wrong: u64,
    /// More descriptors than before the experiment.
    pub descriptors_left: u64,
    pub before_mib: f64,
    pub after_mib: f64,
    /// The longest wait of a request that the fault did not end.
    pub longest_ms: f64,
    /// Promises that did not hold, a sentence each.
    pub broken: Vec<String>,
    /// Worth knowing, and no failure.
    pub notes: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    Holds,
    Fails(Vec<String>),
    NotRun(String),
}

/// A line of the table.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    pub experiment: String,
    pub server: String,
    pub is_gale: bool,
    pub outcome: Option<Outcome>,
    pub verdict: Verdict,
}

impl Outcome {
    /// A promise beside those that are counted: told if it does not hold.
    pub fn check(&mut self, holds: bool, promise: impl Into<String>) {
        if !holds {
            self.broken.push(promise.into());
        }
    }

    fn verdict(&self) -> Verdict {
        let mut broken = Vec::new();
        let mut count = |number: u64, what: &str| {
            if number > 0 {
                broken.push(format!("{number} {what}"));
            }
        };
        count(self.lost, "lost");
        count(self.wrong, "wrong");
        count(self.descriptors_left, "descriptors left");
        broken.extend(self.broken.iter().cloned());
        if broken.is_empty() { Verdict::Holds } else { Verdict::Fails(broken) }
    }
}

impl Row {
    pub fn of(experiment: &str, program: &Program, outcome: Outcome) -> Row {
        Row { outcome: Some(outcome.clone()), ..Row::new(experiment, program, outcome.verdict()) }
    }

    pub fn new(experiment: &str, program: &Program, verdict: Verdict) -> Row {
        Row {
            experiment: experiment.to_owned(),
            server: program.label.clone(),
            is_gale: program.kind == Kind::Gale,
            outcome: None,
            verdict,
        }
    }

    pub fn is_failure_of_gale(&self) -> bool {
        self.is_gale && matches!(self.verdict, Verdict::Fails(_))
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}: {}", self.experiment, self.server, self.verdict)?;
        if let Some(outcome) = &self.outcome {
            write!(
                f,
                "\n  {} requests, {} ended by the fault, {} lost, {} wrong, longest {:.0} ms, {:.1} to {:.1} MiB",
                outcome.requests,
                outcome.ended_by_fault,
                outcome.lost,
                outcome.wrong,
                outcome.longest_ms,
                outcome.before_mib,
                outcome.after_mib
            )?;
            outcome.notes.iter().try_for_each(|note| write!(f, "\n  {note}"))?;
        }
        Ok(())
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Holds => write!(f, "holds"),
            Verdict::Fails(broken) => write!(f, "**fails**: {}", broken.join("; ")),
            Verdict::NotRun(reason) => write!(f, "not run: {reason}"),
        }
    }
}

/// Requests as they end, counted by any number of threads.
#[derive(Debug, Default)]
pub struct Tally {
    requests: AtomicU64,
    ended_by_fault: AtomicU64,
    lost: AtomicU64,
    wrong: AtomicU64,
    longest_us: AtomicU64,
    examples: Mutex<Vec<String>>,
}

impl Tally {
    /// The right answer came.
    pub fn answered(&self, begun: Instant) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.waited(begun.elapsed());
    }

    /// The request ended as the fault makes it.
    pub fn ended_by_fault(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.ended_by_fault.fetch_add(1, Ordering::Relaxed);
    }

    /// The request should have been answered.
    pub fn lost(&self, how: impl fmt::Display) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.lost.fetch_add(1, Ordering::Relaxed);
        self.example(format!("lost: {how}"));
    }

    /// The answer has bytes that are not its own.
    pub fn wrong(&self, how: impl fmt::Display) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.wrong.fetch_add(1, Ordering::Relaxed);
        self.example(format!("wrong: {how}"));
    }

    /// The right answer came, as late as the experiment wants it.
    pub fn answered_late(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// An answer that must be whole and right.
    pub fn must_answer(&self, begun: Instant, what: &str, reply: &Result<Reply, String>, body: &[u8]) {
        match Judgement::of(reply, body) {
            Judgement::Right => self.answered(begun),
            Judgement::Cut(how) => self.lost(format!("{what}: {how}")),
            Judgement::Wrong(how) => self.wrong(format!("{what}: {how}")),
        }
    }

    /// An answer that may be an error, or cut, but not wrong.
    pub fn may_end(&self, begun: Instant, what: &str, reply: &Result<Reply, String>, body: &[u8]) {
        match Judgement::of(reply, body) {
            Judgement::Right => self.answered(begun),
            Judgement::Cut(_) => self.ended_by_fault(),
            Judgement::Wrong(how) => self.wrong(format!("{what}: {how}")),
        }
    }

    /// The requests of a load of `client::load`. With `may_end` requests may end with their connection.
    pub fn add_load(&self, load: &Totals, may_end: bool) {
        self.requests.fetch_add(load.keepalive_requests + load.short_requests + load.failed, Ordering::Relaxed);
        self.longest_us.fetch_max((load.longest_ms * 1e3) as u64, Ordering::Relaxed);
        for (failure, count) in &load.failures {
            let kind = failure.split(' ').next_back().unwrap_or(failure);
            let counter = match kind {
                "malformed" | "wrong_status" | "wrong_body" | "surplus" => &self.wrong,
                "closed_before_answer" | "reset_before_answer" | "truncated" | "send_failed" if may_end => {
                    &self.ended_by_fault
                }
                _ => &self.lost,
            };
            counter.fetch_add(*count, Ordering::Relaxed);
            if !std::ptr::eq(counter, &self.ended_by_fault) {
                self.example(format!("{count} × {failure}"));
            }
        }
    }

    /// The requests of a bystander.
    pub fn add_waits(&self, waits: &Waits) {
        self.requests.fetch_add(waits.count() + waits.failed, Ordering::Relaxed);
        self.lost.fetch_add(waits.failed, Ordering::Relaxed);
        self.longest_us.fetch_max((waits.longest_ms() * 1e3) as u64, Ordering::Relaxed);
        if waits.failed > 0 {
            self.example(format!("lost: {} requests of the bystander", waits.failed));
        }
    }

    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    fn waited(&self, time: Duration) {
        self.longest_us.fetch_max(time.as_micros() as u64, Ordering::Relaxed);
    }

    fn example(&self, text: String) {
        const EXAMPLES_MAX: usize = 3;
        let mut examples = self.examples.lock().expect("nothing panics while it counts");
        if examples.len() < EXAMPLES_MAX {
            examples.push(text);
        }
    }

    pub fn outcome(&self) -> Outcome {
        Outcome {
            requests: self.requests(),
            ended_by_fault: self.ended_by_fault.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
            wrong: self.wrong.load(Ordering::Relaxed),
            longest_ms: self.longest_us.load(Ordering::Relaxed) as f64 / 1e3,
            notes: self.examples.lock().expect("nothing panics while it counts").clone(),
            ..Outcome::default()
        }
    }
}

/// An answer beside the bytes that are right.
enum Judgement {
    Right,
    /// An error, no answer, or a part of the right bytes that is known to be one.
    Cut(String),
    Wrong(String),
}

impl Judgement {
    fn of(reply: &Result<Reply, String>, body: &[u8]) -> Judgement {
        match reply {
            Err(error) => Judgement::Cut(error.clone()),
            Ok(reply) if reply.status >= 400 => Judgement::Cut(format!("status {}", reply.status)),
            Ok(reply) if reply.status == 200 && reply.is_whole && reply.body == body => Judgement::Right,
            Ok(reply) if reply.status == 200 && !reply.is_whole && body.starts_with(&reply.body) => {
                Judgement::Cut(format!("{} of {} bytes", reply.body.len(), body.len()))
            }
            Ok(reply) => {
                let same = reply.body.iter().zip(body).take_while(|(a, b)| a == b).count();
                let whole = if reply.is_whole { "whole" } else { "cut" };
                Judgement::Wrong(format!(
                    "status {}, {whole}, {} bytes for {}, the first {same} the same",
                    reply.status,
                    reply.body.len(),
                    body.len()
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdict_names_each_broken_promise() {
        let mut outcome = Outcome { ended_by_fault: 3, ..Outcome::default() };
        outcome.check(true, "not told");
        assert_eq!(outcome.verdict(), Verdict::Holds);
        outcome.lost = 2;
        outcome.check(false, "no cut");
        assert_eq!(outcome.verdict().to_string(), "**fails**: 2 lost; no cut");
    }

    #[test]
    fn part_of_an_answer_is_wrong_unless_it_is_known_to_be_one() {
        let reply =
            |body: &[u8], is_whole| Ok(Reply { status: 200, head: String::new(), body: body.to_vec(), is_whole });
        let tally = Tally::default();
        tally.may_end(Instant::now(), "", &reply(b"abc", true), b"abc");
        tally.may_end(Instant::now(), "", &reply(b"ab", false), b"abc");
        tally.may_end(Instant::now(), "", &reply(b"ab", true), b"abc");
        tally.may_end(Instant::now(), "", &reply(b"ax", false), b"abc");
        tally.must_answer(Instant::now(), "", &reply(b"ab", false), b"abc");
        let outcome = tally.outcome();
        assert_eq!((outcome.requests, outcome.ended_by_fault, outcome.lost, outcome.wrong), (5, 1, 1, 2));
    }

    #[test]
    fn tally_counts_each_request_once() {
        let tally = Tally::default();
        tally.answered(Instant::now());
        tally.ended_by_fault();
        tally.lost("reset");
        tally.wrong("another body");
        let outcome = tally.outcome();
        assert_eq!((outcome.requests, outcome.ended_by_fault, outcome.lost, outcome.wrong), (4, 1, 1, 1));
        assert_eq!(outcome.notes, ["lost: reset", "wrong: another body"]);
    }
}
