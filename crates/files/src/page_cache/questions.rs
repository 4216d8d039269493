//! Questions to the page cache helper ([`super::helper`]): asked on loops, and answered on a thread of their own.
//!
//! ```text
//!   loop ── sendmsg (descriptor) ──► helper ── answer ──► thread "page cache" ── wake-up ──► loop
//! ```
//!
//! No loop waits: a question that the socket does not take, or that is not answered in time, is answered with
//! "unknown", and a pool reads the piece. When a helper has died, the master starts a new one on the same socket, which
//! announces itself.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use gale_runtime::{Moment, system_now};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::helper::{ANSWER_SIZE, Answer, QUESTION_BYTES_MAX, Question, STARTED};
use crate::File;

/// Questions in flight. The socket's buffer takes about as many.
const QUESTIONS_MAX: usize = 256;

/// Longest wait for an answer. An answer takes about 15 microseconds if a processor is free.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(200);

pub(super) static QUESTIONS: LazyLock<Questions> = LazyLock::new(Questions::default);

#[derive(Default)]
pub(super) struct Questions {
    /// The helper has sent something, and has answered all questions in time since.
    is_served: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    socket: Option<Arc<OwnedFd>>,
    last: u64,
    asked: HashMap<u64, Asked>,
}

struct Asked {
    /// Open until the answer is received, so the helper's descriptor is never the last one of the file.
    _file: File,
    at: Moment,
    until: Instant,
    answer: Arc<Mutex<Pending>>,
}

#[derive(Default)]
struct Pending {
    told: Option<Told>,
    waker: Option<Waker>,
}

/// An answer.
#[derive(Clone, Copy)]
pub(super) struct Told {
    /// Bytes in memory, from the beginning of the range on; `None` if the helper does not know.
    pub bytes: Option<u64>,
    /// Bytes of these that are held there for a moment.
    pub held: u64,
    /// Time of the question.
    pub at: Moment,
}

/// Uses the helper at the other end of this socket (SOCK_SEQPACKET) for this process. Starts a thread.
///
/// # Errors
/// Those of starting a thread.
pub fn use_page_cache_helper(socket: OwnedFd) -> io::Result<()> {
    let socket = Arc::new(socket);
    let receiving = Arc::clone(&socket);
    std::thread::Builder::new().name("page cache".into()).spawn(move || QUESTIONS.receive(&receiving))?;
    QUESTIONS.state.lock().socket = Some(socket);
    Ok(())
}

impl Questions {
    /// True if there is a helper that answers.
    #[inline]
    pub fn is_served(&self) -> bool {
        self.is_served.load(Relaxed)
    }

    /// Asks how much of a range is in memory, from its beginning on; `None` if the helper cannot be asked. The number
    /// of the question does not matter.
    pub fn ask(&self, file: &File, question: Question) -> Option<Asking> {
        if !self.is_served() || question.length == 0 {
            return None;
        }
        let length = question.length.min(QUESTION_BYTES_MAX);
        let mut state = self.state.lock();
        let socket = Arc::clone(state.socket.as_ref()?);
        if state.asked.len() >= QUESTIONS_MAX {
            return None;
        }
        state.last += 1;
        let number = state.last;
        let answer: Arc<Mutex<Pending>> = Arc::default();
        let (at, until) = (system_now(), Instant::now() + ANSWER_TIMEOUT);
        state.asked.insert(number, Asked { _file: file.clone(), at, until, answer: Arc::clone(&answer) });
        drop(state);
        if send(&socket, file, Question { number, length, ..question }).is_err() {
            // The socket is full, or the helper has gone.
            drop(self.state.lock().asked.remove(&number));
            return None;
        }
        Some(Asking(answer))
    }

    fn receive(&self, socket: &OwnedFd) {
        let mut bytes = [0; ANSWER_SIZE];
        let mut looked_at = Instant::now();
        loop {
            let now = Instant::now();
            if now >= looked_at + ANSWER_TIMEOUT / 2 {
                looked_at = now;
                if self.give_up(|asked| asked.until <= now) {
                    // It is stopped or dead: it is not asked again until it sends something.
                    self.is_served.store(false, Relaxed);
                }
            }
            match rustix::net::recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => break,
                Ok((count, _)) => self.handle(&bytes[..count]),
                Err(Errno::AGAIN) => self.wait(socket),
                Err(Errno::INTR | Errno::NOMEM | Errno::NOBUFS) => {}
                Err(_) => break,
            }
        }
        self.is_served.store(false, Relaxed);
        self.give_up(|_| true);
    }

    /// Waits for an answer, but only until the next look for questions that have timed out. While no question is
    /// pending, the thread wakes once a second.
    fn wait(&self, socket: &OwnedFd) {
        let has_asked = !self.state.lock().asked.is_empty();
        let patience = if has_asked { ANSWER_TIMEOUT } else { Duration::from_secs(1) };
        let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
        // An interrupted wait is just shorter.
        let _ = rustix::event::poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout));
    }

    fn handle(&self, bytes: &[u8]) {
        let Some(Answer { number, bytes, held }) = Answer::from_bytes(bytes) else { return };
        if number == STARTED {
            self.give_up(|_| true);
        } else {
            let asked = self.state.lock().asked.remove(&number);
            // The answer to a question that has timed out does not show that the next ones are answered in time.
            let Some(asked) = asked else { return };
            asked.resolve(bytes, held);
        }
        self.is_served.store(true, Relaxed);
    }

    /// Answers these questions with "unknown"; returns whether there were any.
    fn give_up(&self, which: impl Fn(&Asked) -> bool) -> bool {
        let given_up: Vec<Asked> =
            self.state.lock().asked.extract_if(|_, asked| which(asked)).map(|(_, asked)| asked).collect();
        let are_any = !given_up.is_empty();
        given_up.into_iter().for_each(|asked| asked.resolve(None, 0));
        are_any
    }
}

impl Asked {
    fn resolve(self, bytes: Option<u64>, held: u64) {
        let mut pending = self.answer.lock();
        pending.told = Some(Told { bytes, held, at: self.at });
        let waker = pending.waker.take();
        drop(pending);
        // Without a lock, because this may close the file too.
        waker.into_iter().for_each(Waker::wake);
    }
}

fn send(socket: &OwnedFd, file: &File, question: Question) -> Result<(), Errno> {
    let descriptors = [file.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let bytes = question.to_bytes();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[io::IoSlice::new(&bytes)], &mut ancillary, flags).map(drop)
}

/// A pending answer.
pub(super) struct Asking(Arc<Mutex<Pending>>);

impl Future for Asking {
    type Output = Told;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Told> {
        let mut pending = self.0.lock();
        if let Some(told) = pending.told {
            return Poll::Ready(told);
        }
        let displaced = pending.waker.replace(cx.waker().clone());
        drop(pending);
        drop(displaced);
        Poll::Pending
    }
}
