//! A worker's own share of the access logs: lines gather here for a moment and
//! go to the file's queue together.
//!
//! One worker touches its buffers alone, so a line costs no lock. They are
//! handed on after a few milliseconds, when they grow large, and at the end.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::writer::LogWriter;

/// How long a line may wait here. Lines shall reach the file within 100 ms.
const FLUSH_AFTER: Duration = Duration::from_millis(10);

/// A buffer of this size is handed on at once.
const FLUSH_BYTES: usize = 64 * 1024;

/// The buffers of one worker.
#[derive(Debug, Default)]
pub struct AccessBuffers(RefCell<Vec<Pending>>);

#[derive(Debug)]
struct Pending {
    writer: Arc<LogWriter>,
    lines: Vec<u8>,
    is_scheduled: bool,
}

impl AccessBuffers {
    /// Appends one line, made by `write`, for this file. `wait` and `size` are
    /// the directive's `flush=` and `buffer=`, where given.
    pub fn append(self: &Rc<Self>, writer: &Arc<LogWriter>, hold: Option<Hold>, write: impl FnOnce(&mut Vec<u8>)) {
        let mut buffers = self.0.borrow_mut();
        let place = buffers.iter().position(|pending| Arc::ptr_eq(&pending.writer, writer));
        let place = place.unwrap_or_else(|| {
            buffers.push(Pending { writer: Arc::clone(writer), lines: Vec::new(), is_scheduled: false });
            buffers.len() - 1
        });
        let pending = &mut buffers[place];
        write(&mut pending.lines);
        let hold = hold.unwrap_or(Hold { bytes: FLUSH_BYTES, time: Some(FLUSH_AFTER) });
        if pending.lines.len() >= hold.bytes {
            pending.flush();
        } else if let Some(time) = hold.time
            && !std::mem::replace(&mut pending.is_scheduled, true)
        {
            let (buffers, writer) = (Rc::clone(self), Arc::clone(writer));
            gale_runtime::spawn(async move {
                gale_runtime::sleep(time).await;
                buffers.flush_writer(&writer);
            });
        }
    }

    fn flush_writer(&self, writer: &Arc<LogWriter>) {
        let mut buffers = self.0.borrow_mut();
        if let Some(pending) = buffers.iter_mut().find(|pending| Arc::ptr_eq(&pending.writer, writer)) {
            pending.is_scheduled = false;
            pending.flush();
        }
    }

    /// Hands everything on: before the worker ends, and when files are reopened.
    pub fn flush(&self) {
        self.0.borrow_mut().iter_mut().for_each(Pending::flush);
    }

    /// Forgets the files that nothing else refers to any more, after a reload.
    pub fn forget_unused(&self) {
        self.flush();
        self.0.borrow_mut().retain(|pending| pending.is_scheduled || Arc::strong_count(&pending.writer) > 1);
    }
}

/// How long lines may gather: `buffer=` and `flush=` of `access_log`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Handed on when this many bytes have gathered.
    pub bytes: usize,
    /// Handed on after this time; `None` waits for the bytes alone.
    pub time: Option<Duration>,
}

impl Pending {
    fn flush(&mut self) {
        if !self.lines.is_empty() {
            self.writer.append(&self.lines);
            self.lines.clear();
        }
    }
}

impl Drop for AccessBuffers {
    fn drop(&mut self) {
        self.flush();
    }
}
