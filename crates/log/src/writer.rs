//! Queues of log files and the threads that write them: one for files, one for standard error, one for syslog.
//!
//! A line is appended whole under a short lock. A batch of whole lines is written with one call to a descriptor opened
//! with `O_APPEND`, so lines of several processes do not mix. The queue is bounded: lines that do not fit are counted
//! and reported, because a full disk must not stop the server.
//!
//! Only these threads write. If supervising threads did, a FIFO without a reader would block reloads and the
//! replacement of a dead worker process. For a line that must not get lost, the caller waits for the thread, for a
//! bounded time.

use std::collections::HashMap;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::GzEncoder;
use gale_base::log_level::{Level, LineForm};
use gale_base::os_error::OsErrorText;
use parking_lot::{Condvar, Mutex};

use super::syslog::{self, Carrier, Peer, SyslogServer, SyslogSettings};
use super::syslog_stream::{self, Outcome, Secure, StreamPeer};
use gale_process::LogHandle;

/// Bytes that may wait for one file: enough for seconds of a busy log, not for a disk's outage.
const QUEUE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Largest usual batch; larger ones are bursts.
const BATCH_BYTES_USUAL: usize = 256 * 1024;

/// Memory that a queue and the thread keep after a burst: that of usual batches, which grows by doubling.
const KEPT_BYTES_MAX: usize = 2 * BATCH_BYTES_USUAL;

/// Pause after which a burst counts as over, so that memory is not reallocated while large batches recur.
const BURST_PAUSE: Duration = Duration::from_secs(1);

/// Shortest interval between reports of a failing log.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Longest wait for a line that must not get lost; longer than a working disk takes. After a timeout no caller waits
/// for that file again until it has accepted a batch.
const WAIT_TIME_MAX: Duration = Duration::from_millis(200);

/// Attempts for a syslog server that no configuration refers to any more: some seconds in which it may come back.
const TRIES_FOR_NOBODY: u32 = 5;

/// A log file, or standard error, with its queue.
#[derive(Debug)]
pub struct LogWriter {
    file: Output,
    queue: Mutex<Queue>,
    /// Signalled when a batch was written or has failed.
    done: Condvar,
    lost_lines: AtomicU64,
    /// File whose last line was cut short, so that the next write begins a new line. Only its thread takes this lock.
    cut_file: Mutex<Option<FileIdentity>>,
    /// Compression level; each batch is compressed separately. 0 for none.
    gzip: AtomicU32,
    /// Reference to itself; its thread counts the other owners.
    own: Weak<LogWriter>,
}

/// Target of a writer.
#[derive(Debug)]
enum Output {
    File(LogHandle),
    Stderr,
    Syslog(Peer),
    /// A syslog server over a connection.
    Stream(StreamPeer),
}

#[derive(Debug, Default)]
struct Queue {
    bytes: Vec<u8>,
    /// Time when a batch that exceeded the kept memory was last taken.
    last_large: Option<Instant>,
    /// Batches taken, and batches completed.
    batches_taken: u64,
    batches_done: u64,
    /// `true` if a wait has timed out and no batch has completed since.
    is_stuck: bool,
    /// `true` if the thread was woken for this queue, or is writing it.
    is_scheduled: bool,
    reported: Option<Instant>,
    lost_reported: u64,
}

impl LogWriter {
    fn new(file: Output) -> LogWriter {
        let (lost_lines, gzip) = (AtomicU64::new(0), AtomicU32::new(0));
        let (queue, cut_file) = (Mutex::default(), Mutex::default());
        LogWriter { file, queue, done: Condvar::new(), lost_lines, cut_file, gzip, own: Weak::new() }
    }

    /// Appends whole lines, to be written soon. Never waits for the file.
    pub fn append(self: &Arc<Self>, lines: &[u8]) {
        let must_schedule = {
            let mut queue = self.queue.lock();
            if queue.bytes.len() + lines.len() > QUEUE_BYTES_MAX {
                self.count_lost(lines);
                return;
            }
            queue.bytes.extend_from_slice(lines);
            !std::mem::replace(&mut queue.is_scheduled, true)
        };
        if must_schedule {
            match &self.file {
                Output::Stream(peer) => self.schedule_stream(peer),
                file => file.thread().schedule(Arc::clone(self)),
            }
        }
    }

    /// Wakes the server's own thread. If it cannot be started, the next line tries again.
    fn schedule_stream(self: &Arc<Self>, peer: &StreamPeer) {
        let writer = Arc::clone(self);
        let start = || {
            let thread = std::thread::Builder::new().name("log syslog".to_owned());
            thread.spawn(move || writer.run_stream()).map(drop)
        };
        if !peer.schedule(start) {
            self.queue.lock().is_scheduled = false;
        }
    }

    /// The thread of a syslog server over a connection.
    fn run_stream(self: Arc<Self>) {
        let Output::Stream(peer) = &self.file else { return };
        gale_runtime::affinity::leave_processors();
        let mut spare = Vec::new();
        while peer.wait_due() {
            self.write_batch(&mut spare);
            spare.shrink_to(KEPT_BYTES_MAX);
            self.shrink(Instant::now() + BURST_PAUSE);
        }
    }

    /// Sends a batch, however long that takes; meanwhile lines gather in the queue. Callers do not wait for a failed
    /// server, and batches for one without users are given up.
    fn write_stream(&self, peer: &StreamPeer, batch: &[u8]) -> io::Result<()> {
        let (mut rest, mut failures) = (batch, 0);
        loop {
            match peer.send(rest) {
                Outcome::Sent => return Ok(()),
                Outcome::Failed(sent, error) => {
                    rest = &rest[sent..];
                    failures = if sent > 0 { 1 } else { failures + 1 };
                    if failures >= TRIES_FOR_NOBODY && self.own.strong_count() <= 1 {
                        self.count_lost(rest);
                        return Err(error);
                    }
                    self.queue.lock().is_stuck = true;
                    self.done.notify_all();
                    self.report(&format!("failed {}", OsErrorText(&error)));
                }
            }
            std::thread::sleep(syslog_stream::pause(failures));
        }
    }

    /// As [`LogWriter::append`], but returns once the lines are in the file, or after a short timeout.
    pub fn append_and_wait(self: &Arc<Self>, lines: &[u8]) {
        self.append(lines);
        let deadline = Instant::now() + WAIT_TIME_MAX;
        let mut queue = self.queue.lock();
        // The lines are in the next batch, unless that was taken meanwhile.
        let batch = queue.batches_taken + u64::from(!queue.bytes.is_empty());
        while queue.batches_done < batch && !queue.is_stuck {
            let is_over = self.done.wait_until(&mut queue, deadline).timed_out();
            queue.is_stuck = is_over && queue.batches_done < batch;
        }
    }

    /// Sets the compression level (1 to 9); 0 for none. One file has one level.
    pub fn set_gzip(&self, level: u32) {
        self.gzip.store(level, Ordering::Relaxed);
    }

    /// Lines lost since the process started.
    pub fn lost_lines(&self) -> u64 {
        self.lost_lines.load(Ordering::Relaxed)
    }

    fn name(&self) -> String {
        match &self.file {
            Output::File(file) => file.path().display().to_string(),
            Output::Stderr => "stderr".to_owned(),
            Output::Syslog(peer) => peer.name(),
            Output::Stream(peer) => peer.name(),
        }
    }

    fn count_lost(&self, lines: &[u8]) {
        let count = match self.file {
            Output::File(_) | Output::Stderr => memchr::memchr_iter(b'\n', lines).count(),
            Output::Syslog(_) | Output::Stream(_) => syslog::records(lines).count(),
        };
        self.lost_lines.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Writes the gathered lines; called only by the thread.
    fn write_batch(&self, spare: &mut Vec<u8>) {
        loop {
            spare.clear();
            {
                let mut queue = self.queue.lock();
                if queue.batches_done < queue.batches_taken {
                    queue.batches_done = queue.batches_taken;
                    queue.is_stuck = false;
                    self.done.notify_all();
                }
                if queue.bytes.is_empty() {
                    queue.is_scheduled = false;
                    return;
                }
                std::mem::swap(&mut queue.bytes, spare);
                queue.batches_taken += 1;
                if spare.len() > BATCH_BYTES_USUAL {
                    queue.last_large = Some(Instant::now());
                }
            }
            match self.write(spare) {
                Err(error) => self.report(&format!("failed {}", OsErrorText(&error))),
                Ok(()) if self.has_unreported_losses() => self.report("was too slow"),
                Ok(()) => {}
            }
        }
    }

    /// `true` if its queue has been large since it was last shrunk, or has memory from another one that was.
    fn is_swollen(&self) -> bool {
        let queue = self.queue.lock();
        queue.last_large.is_some() || queue.bytes.capacity() > KEPT_BYTES_MAX
    }

    /// Frees memory left by a burst that is over; returns `true` if a burst is still in progress.
    fn shrink(&self, now: Instant) -> bool {
        let mut queue = self.queue.lock();
        if queue.last_large.is_some_and(|last| now.duration_since(last) < BURST_PAUSE) {
            return true;
        }
        queue.last_large = None;
        if queue.bytes.capacity() > KEPT_BYTES_MAX {
            let kept = queue.bytes.to_vec();
            let large = std::mem::replace(&mut queue.bytes, kept);
            // Freeing megabytes takes time, and event loops wait for the lock.
            drop(queue);
            drop(large);
        }
        false
    }

    /// Writes a batch and counts lost lines.
    fn write(&self, batch: &[u8]) -> io::Result<()> {
        let file = match &self.file {
            Output::Syslog(peer) => {
                return peer.send_all(batch).map_err(|(error, lost)| {
                    self.lost_lines.fetch_add(lost, Ordering::Relaxed);
                    error
                });
            }
            Output::Stream(peer) => return self.write_stream(peer, batch),
            file => file,
        };
        let level = self.gzip.load(Ordering::Relaxed);
        if level > 0 {
            // A partial gzip member is useless, so the whole batch is lost.
            let compressed = compress(batch, level);
            return write_all(file, &compressed).map_err(|(error, _)| {
                self.count_lost(batch);
                error
            });
        }
        self.write_lines(file, batch)
    }

    /// Writes uncompressed lines, beginning a new line if the last write was cut short by a full disk. That does not
    /// apply to a file that was reopened or truncated since.
    fn write_lines(&self, file: &Output, batch: &[u8]) -> io::Result<()> {
        let mut cut_file = self.cut_file.lock();
        if cut_file.is_some_and(|cut| cut.is_still_cut(file)) {
            write_all(file, b"\n").map_err(|(error, _)| {
                self.count_lost(batch);
                error
            })?;
        }
        *cut_file = None;
        write_all(file, batch).map_err(|(error, unwritten)| {
            let (written, lost) = batch.split_at(batch.len() - unwritten);
            let is_cut = written.last().is_some_and(|&last| last != b'\n');
            *cut_file = if is_cut { FileIdentity::of(file) } else { None };
            self.count_lost(lost);
            error
        })
    }

    fn has_unreported_losses(&self) -> bool {
        self.lost_lines() > self.queue.lock().lost_reported
    }

    /// Reports lost lines, at most once a minute.
    fn report(&self, what: &str) {
        let lost = self.lost_lines();
        {
            let mut queue = self.queue.lock();
            if queue.reported.is_some_and(|last| last.elapsed() < REPORT_INTERVAL) {
                return;
            }
            queue.reported = Some(Instant::now());
            queue.lost_reported = lost;
        }
        let message = format!("write() to \"{}\" {what}, {lost} lines lost so far", self.name());
        let writers = Writers::of_process();
        let line = match writers.reports_json.load(Ordering::Relaxed) {
            true => super::json::error_line(Level::Alert, None, &message, &(), super::ERROR_LINE_MAX),
            false => super::error_line(Level::Alert, None, &message),
        };
        writers.stderr().append(line.as_bytes());
    }
}

/// A gzip member; `zcat` reads a file of several members as one. (RFC 1952 §2.2)
fn compress(batch: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::with_capacity(batch.len() / 4 + 64), Compression::new(level));
    // Writing to memory cannot fail.
    let _ = encoder.write_all(batch);
    encoder.finish().unwrap_or_default()
}

/// Identity of the file behind a descriptor, which changes when it is reopened.
#[derive(Clone, Copy, Debug)]
struct FileIdentity {
    device: rustix::fs::Dev,
    inode: u64,
}

impl FileIdentity {
    fn of(output: &Output) -> Option<FileIdentity> {
        let stat = rustix::fs::fstat(output.descriptor()).ok()?;
        Some(FileIdentity { device: stat.st_dev, inode: stat.st_ino })
    }

    /// `true` if this file is still the one written to, and it is not empty.
    fn is_still_cut(self, output: &Output) -> bool {
        let Ok(stat) = rustix::fs::fstat(output.descriptor()) else { return true };
        let is_regular = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
        (stat.st_dev, stat.st_ino) == (self.device, self.inode) && !(is_regular && stat.st_size == 0)
    }
}

/// An error comes with the number of bytes left.
fn write_all(output: &Output, bytes: &[u8]) -> Result<(), (io::Error, usize)> {
    let mut rest = bytes;
    while !rest.is_empty() {
        match rustix::io::write(output.descriptor(), rest) {
            Ok(0) => return Err((io::ErrorKind::WriteZero.into(), rest.len())),
            Ok(written) => rest = &rest[written..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err((error.into(), rest.len())),
        }
    }
    Ok(())
}

/// Key of writers for syslog servers: server, transport, certificate name and trusted authorities.
type SyslogKey = (SyslogServer, Carrier, Box<str>, u64);

/// Writers of this process, by path. All logs to the same file share one queue, so that lines keep their order across a
/// reload.
#[derive(Debug, Default)]
pub struct Writers {
    files: Mutex<HashMap<PathBuf, Weak<LogWriter>>>,
    syslogs: Mutex<HashMap<SyslogKey, Weak<LogWriter>>>,
    stderr: OnceLock<Arc<LogWriter>>,
    reports_json: AtomicBool,
}

impl Writers {
    /// The writers of this process.
    pub fn of_process() -> &'static Writers {
        static WRITERS: OnceLock<Writers> = OnceLock::new();
        WRITERS.get_or_init(Writers::default)
    }

    /// Sets the form of messages about failing logs.
    pub fn set_report_form(&self, form: LineForm) {
        self.reports_json.store(form == LineForm::Json, Ordering::Relaxed);
    }

    /// The writer for an open file.
    pub fn writer(&self, file: &LogHandle) -> Arc<LogWriter> {
        let mut writers = self.files.lock();
        let known = writers.get(file.path()).and_then(Weak::upgrade);
        let is_same = |writer: &LogWriter| matches!(&writer.file, Output::File(own) if Arc::ptr_eq(own, file));
        if let Some(writer) = known.filter(|writer| is_same(writer)) {
            return writer;
        }
        writers.retain(|_, writer| writer.strong_count() > 0);
        let writer = Arc::new(LogWriter::new(Output::File(Arc::clone(file))));
        writers.insert(file.path().to_owned(), Arc::downgrade(&writer));
        writer
    }

    /// The writer for a syslog server, shared by all logs to it.
    pub(super) fn syslog(&self, settings: &SyslogSettings, secure: Option<Arc<dyn Secure>>) -> Arc<LogWriter> {
        let (server, carrier) = (&settings.server, settings.carrier);
        let (name, identity) = match &secure {
            Some(secure) => (settings.name.clone(), secure.identity()),
            None => (Box::default(), 0),
        };
        let key = (server.clone(), carrier, name, identity);
        let mut writers = self.syslogs.lock();
        if let Some(writer) = writers.get(&key).and_then(Weak::upgrade) {
            return writer;
        }
        writers.retain(|_, writer| writer.strong_count() > 0);
        let output = match (carrier, server) {
            (Carrier::Tcp | Carrier::Tls, SyslogServer::Inet(address)) => {
                Output::Stream(StreamPeer::new(*address, secure))
            }
            _ => Output::Syslog(Peer::new(server.clone())),
        };
        let writer = Arc::new_cyclic(|own| LogWriter { own: Weak::clone(own), ..LogWriter::new(output) });
        writers.insert(key, Arc::downgrade(&writer));
        writer
    }

    /// The writer for standard error, which may be a pipe without a reader and so must not be written by a loop either.
    pub fn stderr(&self) -> &Arc<LogWriter> {
        self.stderr.get_or_init(|| Arc::new(LogWriter::new(Output::Stderr)))
    }
}

/// A writing thread, started with the first line. Files, standard error and syslog have one each, so a pipe or socket
/// without a reader blocks nothing else.
struct WriterThread {
    /// If `false`, lines are written by the calling thread.
    is_there: bool,
    dirty: Mutex<Dirty>,
    changed: Condvar,
}

#[derive(Default)]
struct Dirty {
    /// Contains each writer at most once (`Queue::is_scheduled`).
    writers: Vec<Arc<LogWriter>>,
    is_writing: bool,
}

static FILES: OnceLock<WriterThread> = OnceLock::new();
static STDERR: OnceLock<WriterThread> = OnceLock::new();
static SYSLOG: OnceLock<WriterThread> = OnceLock::new();

impl Output {
    fn descriptor(&self) -> BorrowedFd<'_> {
        match self {
            Output::File(file) => file.as_fd(),
            Output::Stderr => rustix::stdio::stderr(),
            Output::Syslog(_) | Output::Stream(_) => unreachable!("messages are sent"),
        }
    }

    fn thread(&self) -> &'static WriterThread {
        match self {
            Output::File(_) => WriterThread::get(&FILES, "log"),
            Output::Stderr => WriterThread::get(&STDERR, "log stderr"),
            Output::Syslog(_) => WriterThread::get(&SYSLOG, "log syslog"),
            Output::Stream(_) => unreachable!("it has a thread of its own"),
        }
    }
}

impl WriterThread {
    /// The thread of this place, started at the first call.
    fn get(place: &'static OnceLock<WriterThread>, name: &str) -> &'static WriterThread {
        place.get_or_init(|| {
            let run = move || {
                gale_runtime::affinity::leave_processors();
                WriterThread::get(place, "").run();
            };
            let is_there = std::thread::Builder::new().name(name.to_owned()).spawn(run).is_ok();
            WriterThread { is_there, dirty: Mutex::default(), changed: Condvar::new() }
        })
    }

    fn schedule(&self, writer: Arc<LogWriter>) {
        if !self.is_there {
            return writer.write_batch(&mut Vec::new());
        }
        self.dirty.lock().writers.push(writer);
        self.changed.notify_all();
    }

    fn run(&self) {
        let mut spare = Vec::new();
        // Writers that were recently large, each once and only while they have other owners.
        let mut swollen: Vec<Weak<LogWriter>> = Vec::new();
        loop {
            let writers = {
                let mut dirty = self.dirty.lock();
                dirty.is_writing = false;
                self.changed.notify_all();
                let until = (!swollen.is_empty()).then(|| Instant::now() + BURST_PAUSE);
                while dirty.writers.is_empty() {
                    match until {
                        None => self.changed.wait(&mut dirty),
                        Some(until) if self.changed.wait_until(&mut dirty, until).timed_out() => break,
                        Some(_) => {}
                    }
                }
                dirty.is_writing = !dirty.writers.is_empty();
                std::mem::take(&mut dirty.writers)
            };
            for writer in &writers {
                writer.write_batch(&mut spare);
                if writer.is_swollen() && !swollen.iter().any(|known| known.as_ptr() == Arc::as_ptr(writer)) {
                    swollen.push(Arc::downgrade(writer));
                }
            }
            drop(writers);
            if !swollen.is_empty() {
                let now = Instant::now();
                swollen.retain(|writer| writer.upgrade().is_some_and(|writer| writer.shrink(now)));
                if swollen.is_empty() {
                    spare = Vec::new();
                }
            }
        }
    }
}

/// Waits until all log lines are written, or until the deadline.
pub(super) fn finish(deadline: Instant) {
    for thread in [&FILES, &SYSLOG, &STDERR].into_iter().filter_map(OnceLock::get) {
        let mut dirty = thread.dirty.lock();
        while !dirty.writers.is_empty() || dirty.is_writing {
            if thread.changed.wait_until(&mut dirty, deadline).timed_out() {
                break;
            }
        }
    }
    let syslogs: Vec<_> = Writers::of_process().syslogs.lock().values().filter_map(Weak::upgrade).collect();
    for writer in syslogs.iter().filter(|writer| matches!(writer.file, Output::Stream(_))) {
        let mut queue = writer.queue.lock();
        // A failed server is not awaited.
        while queue.is_scheduled && !queue.is_stuck {
            if writer.done.wait_until(&mut queue, deadline).timed_out() {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::AsRawFd as _;
    use std::path::Path;

    use super::*;
    use gale_process::LogFile;

    #[test]
    fn a_line_that_was_cut_short_is_not_continued_by_the_next() {
        let (mut reader, end) = std::io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", end.as_raw_fd());
        let file = Arc::new(LogFile::open(Path::new(&path)).unwrap());
        for descriptor in [file.as_fd(), reader.as_fd()] {
            rustix::fs::fcntl_setfl(descriptor, rustix::fs::OFlags::NONBLOCK).unwrap();
        }
        let mut read = || {
            let mut bytes = Vec::new();
            assert_eq!(reader.read_to_end(&mut bytes).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            String::from_utf8(bytes).unwrap()
        };
        let writer = LogWriter::new(Output::File(file));
        // More than the capacity of a pipe, and not a multiple of a line.
        let lines = format!("{:099}\n", 7).repeat(20_000);
        let has_lost = || writer.write(lines.as_bytes()).is_err();
        assert!(has_lost() && has_lost(), "the second finds no room at all");
        let written = read();
        assert!(!written.is_empty() && !written.ends_with('\n'));
        assert_eq!(writer.lost_lines() as usize, 2 * 20_000 - written.lines().count() + 1);
        writer.write(b"next\n").unwrap();
        writer.write(b"last\n").unwrap();
        assert_eq!(read(), "\nnext\nlast\n");
    }

    #[test]
    fn the_rest_of_a_line_is_ended_only_where_it_is() {
        let path = std::env::temp_dir().join(format!("gale-cut-line-{}", std::process::id()));
        let file = Arc::new(LogFile::open(&path).unwrap());
        let writer = LogWriter::new(Output::File(file));
        let write = |bytes: &[u8], last: &str| {
            *writer.cut_file.lock() = FileIdentity::of(&writer.file);
            std::fs::write(&path, bytes).unwrap();
            writer.write(last.as_bytes()).unwrap();
            std::fs::read_to_string(&path).unwrap()
        };
        assert_eq!(write(b"whole\ncu", "next\n"), "whole\ncu\nnext\n");
        assert_eq!(write(b"", "next\n"), "next\n", "it was truncated meanwhile");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn the_memory_of_a_burst_goes_back_when_it_is_over() {
        let writer = Arc::new(LogWriter::new(Output::File(Arc::new(LogFile::open(Path::new("/dev/null")).unwrap()))));
        let line = [b'x'; 1000];
        let burst = |bytes: usize| {
            let mut queue = writer.queue.lock();
            // Keeps the thread out, as if it had been woken already.
            queue.is_scheduled = true;
            (0..bytes / line.len()).for_each(|_| queue.bytes.extend_from_slice(&line));
        };
        let capacity = || writer.queue.lock().bytes.capacity();
        let mut spare = Vec::new();

        // Usual memory is kept and not tracked.
        burst(BATCH_BYTES_USUAL);
        writer.write_batch(&mut spare);
        assert!(!writer.is_swollen());

        burst(QUEUE_BYTES_MAX);
        burst(1000);
        writer.write_batch(&mut spare);
        burst(QUEUE_BYTES_MAX);
        writer.write_batch(&mut spare);
        assert!(writer.is_swollen() && capacity() >= QUEUE_BYTES_MAX, "{}", capacity());

        // During a burst nothing is freed that would be needed again.
        let now = Instant::now();
        assert!(writer.shrink(now));
        assert!(capacity() >= QUEUE_BYTES_MAX);
        burst(2000);
        writer.write_batch(&mut spare);
        assert!(!writer.shrink(now + BURST_PAUSE));
        assert!(capacity() <= KEPT_BYTES_MAX && !writer.is_swollen(), "{}", capacity());
        assert_eq!(writer.lost_lines(), 0);
    }
}
