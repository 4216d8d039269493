//! Answers to requests when nothing goes wrong: the reference for all other runs.

use gale_runtime::simulation::{Faults, Peer, PeerEnd, Random, Simulation, Transcript};
use gale_runtime::{Moment, Stream};

use super::requests::{Item, add_files, configuration};
use super::{address, run};

/// Received answers without the boundaries of chunks, which may be anywhere.
#[derive(Debug, Default)]
pub struct Received {
    /// Heads, bodies, and a mark after the last chunk of a body.
    pub bytes: Vec<u8>,
    /// Number of complete final answers.
    pub complete: usize,
    /// An interim answer follows them.
    pub has_interim: bool,
    /// A part of another answer follows them.
    pub has_part: bool,
}

const LAST_CHUNK: &[u8] = b"<last chunk>";

impl Received {
    /// Parses received bytes. `heads` is true for each request that was a HEAD. Panics when the framing is broken.
    pub fn new(mut rest: &[u8], heads: &[bool]) -> Received {
        let mut received = Received::default();
        while !rest.is_empty() {
            let Some(head) = positions(rest, b"\r\n\r\n").next().map(|at| at + 4) else { break };
            let text = std::str::from_utf8(&rest[..head]).expect("heads are text");
            let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
            let status = &text[9..12];
            let has_body = !heads.get(received.complete).is_some_and(|is_head| *is_head) && status != "304";
            received.bytes.extend(&rest[..head]);
            rest = &rest[head..];
            received.has_part = true;
            if status.starts_with('1') {
                received.has_interim = true;
                continue;
            }
            let is_complete = if !has_body {
                true
            } else if field("Transfer-Encoding: ").is_some() {
                received.take_chunks(&mut rest)
            } else {
                let length = field("Content-Length: ").map(|value| value.parse().expect("a number"));
                let body = rest.split_off(..rest.len().min(length.unwrap_or(usize::MAX))).expect("within");
                received.bytes.extend(body);
                Some(body.len()) == length
            };
            if !is_complete {
                return received;
            }
            received.complete += 1;
            (received.has_interim, received.has_part) = (false, false);
        }
        received.has_part |= !rest.is_empty();
        received.bytes.extend(rest);
        received
    }

    /// Takes the available chunks of a body; returns `true` if the body is complete.
    fn take_chunks(&mut self, rest: &mut &[u8]) -> bool {
        loop {
            let Some(end) = positions(rest, b"\r\n").next() else { break };
            let size = std::str::from_utf8(&rest[..end]).ok().and_then(|size| usize::from_str_radix(size, 16).ok());
            let size = size.expect("the size of a chunk");
            let chunk = &rest[end + 2..];
            let data = &chunk[..chunk.len().min(size)];
            self.bytes.extend(data);
            if chunk.len() < size + 2 {
                break;
            }
            assert_eq!(&chunk[size..size + 2], b"\r\n", "behind a chunk");
            *rest = &chunk[size + 2..];
            if size == 0 {
                self.bytes.extend(LAST_CHUNK);
                return true;
            }
        }
        *rest = &[];
        false
    }
}

/// One or more answers. Some bytes may differ from run to run: dates, and boundaries of multipart bodies.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub bytes: Vec<u8>,
    /// `true` for bytes that may differ.
    varies: Vec<bool>,
}

impl Answer {
    fn new(bytes: Vec<u8>) -> Answer {
        let mut varies = vec![false; bytes.len()];
        let mut mask = |at: usize, length: usize| varies[at..at + length].fill(true);
        for at in positions(&bytes, b"\r\nDate: ") {
            mask(at + 8, 29);
        }
        for at in positions(&bytes, b"boundary=") {
            let boundary = &bytes[at + 9..at + 29];
            assert!(boundary.iter().all(u8::is_ascii_digit));
            positions(&bytes, boundary).for_each(|at| mask(at, boundary.len()));
        }
        Answer { bytes, varies }
    }

    /// The answers as if the server closed the connection after each of them.
    pub fn closing(&self) -> Answer {
        const KEEP: &[u8] = b"\r\nConnection: keep-alive\r\n";
        let mut answer = self.clone();
        let places: Vec<usize> = positions(&self.bytes, KEEP).collect();
        for at in places.into_iter().rev() {
            let value = at + b"\r\nConnection: ".len()..at + KEEP.len() - b"\r\n".len();
            answer.varies.splice(value.clone(), [false; b"close".len()]);
            answer.bytes.splice(value, *b"close");
        }
        answer
    }

    pub fn append(&mut self, other: &Answer) {
        self.bytes.extend(&other.bytes);
        self.varies.extend(&other.varies);
    }

    /// Offset of the first byte in `received` that differs from this.
    pub fn first_difference(&self, received: &[u8]) -> Option<usize> {
        let differs = |at: usize| self.bytes.get(at).is_none_or(|&own| own != received[at] && !self.varies[at]);
        (0..received.len()).find(|&at| differs(at))
    }
}

fn positions(bytes: &[u8], what: &[u8]) -> impl Iterator<Item = usize> {
    (0..bytes.len().saturating_sub(what.len() - 1)).filter(move |&at| bytes[at..].starts_with(what))
}

/// An item's answer to a client that is alone.
pub struct Baseline {
    pub answer: Answer,
    pub end: PeerEnd,
    /// Times at which the connection was made and ended.
    pub times: (Moment, Moment),
}

impl Baseline {
    /// Sends the item's request and checks the answer against the item's expectations.
    pub fn of(item: &Item) -> Baseline {
        let simulation = Simulation::new(0, Faults::NONE);
        add_files(&simulation);
        let (begun, transcript) = run(&simulation, &configuration(), async |_| {
            let stream = Stream::connect(&address()).await.expect("somebody listens");
            (simulation.now(), Peer::new(item.sends(0, [item.is_head()].into())).play(stream, &Random::new(0)).await)
        });
        item.check(&transcript);
        let Transcript { received, end, ended, .. } = transcript;
        let received = Received::new(&received, &[item.is_head()]);
        let answer = Answer::new(item.whole_answer(received.bytes));
        Baseline { answer, end, times: (begun, ended) }
    }
}
