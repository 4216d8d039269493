//! A worker's buffers for access logs: lines gather here briefly and go to the file's queue together.
//!
//! Only one worker uses its buffers, so a line costs no lock. They are handed on after a few milliseconds, when they
//! grow large, and at the end.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::writer::LogWriter;

/// Longest wait of a line here. Lines shall reach the file within 100 ms.
const FLUSH_AFTER: Duration = Duration::from_millis(10);

/// Size at which a buffer is handed on at once.
const FLUSH_BYTES: usize = 64 * 1024;

/// Buffers of one worker.
#[derive(Debug, Default)]
pub struct AccessBuffers(RefCell<Vec<Pending>>);

#[derive(Debug)]
struct Pending {
    writer: Arc<LogWriter>,
    lines: Vec<u8>,
    is_scheduled: bool,
}

impl AccessBuffers {
    /// Appends one line for this file, made by `write`. `hold` has the directive's `flush=` and `buffer=`, if given.
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

    /// Hands on all lines: before the worker ends, and when files are reopened.
    pub fn flush(&self) {
        self.0.borrow_mut().iter_mut().for_each(Pending::flush);
    }

    /// Drops the files that nothing else refers to, after a reload.
    pub fn forget_unused(&self) {
        self.flush();
        self.0.borrow_mut().retain(|pending| pending.is_scheduled || Arc::strong_count(&pending.writer) > 1);
    }
}

/// Limits on gathering lines: `buffer=` and `flush=` of `access_log`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Bytes after which lines are handed on.
    pub bytes: usize,
    /// Time after which lines are handed on; `None` for no limit.
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
