//! The queue of each log file and the threads that write: one for files, one for
//! standard error, one for syslog.
//!
//! A line is appended whole under a short lock; a batch of whole lines is
//! written with one call to a descriptor opened with `O_APPEND`, so lines of
//! several processes do not mix. The queue is bounded: what does not fit is
//! counted and reported, because a full disk must not stop the server.
//!
//! Nobody else writes, not even the threads that supervise: a FIFO that nobody
//! reads would hold up reloads and the replacement of a dead worker process.
//! Whoever has something to say that must not get lost waits for the thread, for
//! a bounded time.

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

/// Bytes that may wait for one file: seconds of a busy log, not a disk's outage.
const QUEUE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Larger batches are those of a burst of lines.
const BATCH_BYTES_USUAL: usize = 256 * 1024;

/// The memory that a queue and the thread keep once a burst is over: as much as usual batches make of it, since memory
/// grows by doubling.
const KEPT_BYTES_MAX: usize = 2 * BATCH_BYTES_USUAL;

/// How long it takes until a burst counts as over: nothing is allocated anew for batches that are large again and
/// again.
const BURST_PAUSE: Duration = Duration::from_secs(1);

/// A failing log is reported at most this often.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// How long somebody waits for a line that must not get lost; longer than a disk at work takes. Nobody waits again for
/// a file that has not taken such a line, until it has.
const WAIT_TIME_MAX: Duration = Duration::from_millis(200);

/// How often a syslog server is tried that no configuration names any more: some seconds, in which it may be back.
const TRIES_FOR_NOBODY: u32 = 5;

/// One log file, or standard error, with its queue.
#[derive(Debug)]
pub struct LogWriter {
    file: Output,
    queue: Mutex<Queue>,
    /// A batch has been written, or could not be.
    done: Condvar,
    lost_lines: AtomicU64,
    /// The file whose last line was cut short: nothing is to follow on it. Only its thread takes this lock.
    cut_file: Mutex<Option<FileIdentity>>,
    /// Batches are compressed at this level, each by itself; 0 for not at all.
    gzip: AtomicU32,
    /// Itself, where its thread has to know whether anybody else still logs there.
    own: Weak<LogWriter>,
}

/// Where a writer writes.
#[derive(Debug)]
enum Output {
    File(LogHandle),
    Stderr,
    Syslog(Peer),
    /// A syslog server behind a connection.
    Stream(StreamPeer),
}

#[derive(Debug, Default)]
struct Queue {
    bytes: Vec<u8>,
    /// When the last batch was taken that needed more memory than is kept.
    last_large: Option<Instant>,
    /// How many batches have been taken and how many are done with.
    batches_taken: u64,
    batches_done: u64,
    /// Somebody has waited in vain, and no batch has been done with since.
    is_stuck: bool,
    /// Someone has told the thread, or the thread is writing.
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

    /// Appends whole lines; they are written soon. Never waits for the file.
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

    /// Has the server's own thread send what waits. If it cannot be started, the next line tries again.
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

    /// The thread of a syslog server behind a connection.
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

    /// Sends a batch, however long that takes: meanwhile lines gather in the queue. Nothing waits for a server that has
    /// failed, and what nobody logs to any more is given up.
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

    /// As [`LogWriter::append`], and returns when the lines are in the file, or after a short while if that holds them
    /// up.
    pub fn append_and_wait(self: &Arc<Self>, lines: &[u8]) {
        self.append(lines);
        let deadline = Instant::now() + WAIT_TIME_MAX;
        let mut queue = self.queue.lock();
        // What was appended is in the next batch, unless that has been taken meanwhile.
        let batch = queue.batches_taken + u64::from(!queue.bytes.is_empty());
        while queue.batches_done < batch && !queue.is_stuck {
            let is_over = self.done.wait_until(&mut queue, deadline).timed_out();
            queue.is_stuck = is_over && queue.batches_done < batch;
        }
    }

    /// From now on what is written is compressed at this level (1 to 9); 0 for not at all. One file has one level.
    pub fn set_gzip(&self, level: u32) {
        self.gzip.store(level, Ordering::Relaxed);
    }

    /// How many lines could not be written since the process started.
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

    /// Writes what has gathered; called by the thread alone.
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

    /// Whether its queue has been large since it was last shrunk, or has been given the memory of one that was.
    fn is_swollen(&self) -> bool {
        let queue = self.queue.lock();
        queue.last_large.is_some() || queue.bytes.capacity() > KEPT_BYTES_MAX
    }

    /// Gives back what a burst has left, if it is over; says whether one is not.
    fn shrink(&self, now: Instant) -> bool {
        let mut queue = self.queue.lock();
        if queue.last_large.is_some_and(|last| now.duration_since(last) < BURST_PAUSE) {
            return true;
        }
        queue.last_large = None;
        if queue.bytes.capacity() > KEPT_BYTES_MAX {
            let kept = queue.bytes.to_vec();
            let large = std::mem::replace(&mut queue.bytes, kept);
            // Giving back megabytes takes its time, and event loops wait for the lock.
            drop(queue);
            drop(large);
        }
        false
    }

    /// Writes a batch; what is lost is counted.
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
            // Half a member is none: all of it is lost then.
            let compressed = compress(batch, level);
            return write_all(file, &compressed).map_err(|(error, _)| {
                self.count_lost(batch);
                error
            });
        }
        self.write_lines(file, batch)
    }

    /// Writes lines as they are, on lines of their own: a disk that is full may have taken a part of one before. A file
    /// that was opened anew or truncated since has no such part.
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

    /// Tells of lines that were lost, at most once a minute.
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

/// A gzip member: files of several of them are what `zcat` reads as one. (RFC 1952 §2.2)
fn compress(batch: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::with_capacity(batch.len() / 4 + 64), Compression::new(level));
    // Writing to memory never fails.
    let _ = encoder.write_all(batch);
    encoder.finish().unwrap_or_default()
}

/// Which file a descriptor leads to: reopening puts another one there.
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

    /// Whether this is the file that is written to, with something in it.
    fn is_still_cut(self, output: &Output) -> bool {
        let Ok(stat) = rustix::fs::fstat(output.descriptor()) else { return true };
        let is_regular = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
        (stat.st_dev, stat.st_ino) == (self.device, self.inode) && !(is_regular && stat.st_size == 0)
    }
}

/// The error comes with how many bytes were left.
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

/// What writers for syslog servers are told apart by: the server, how, by which name and whom that trusts.
type SyslogKey = (SyslogServer, Carrier, Box<str>, u64);

/// The writers of this process, by path: whoever logs to the same file shares
/// one queue, so that lines keep their order across a reload.
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

    /// How lines look that tell of a log which cannot be written.
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

    /// The writer for a syslog server, which all who log there share.
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

    /// The writer for standard error: a pipe that nobody reads must not hold up a
    /// loop either.
    pub fn stderr(&self) -> &Arc<LogWriter> {
        self.stderr.get_or_init(|| Arc::new(LogWriter::new(Output::Stderr)))
    }
}

/// A thread that writes, started with the first line. Files have one, standard error
/// and syslog others: a pipe or a socket that nobody reads holds up nothing else.
struct WriterThread {
    /// Without it lines are written where they arise.
    is_there: bool,
    dirty: Mutex<Dirty>,
    changed: Condvar,
}

#[derive(Default)]
struct Dirty {
    /// Each writer stands here at most once (`Queue::is_scheduled`).
    writers: Vec<Arc<LogWriter>>,
    is_writing: bool,
}

static FILES: OnceLock<WriterThread> = OnceLock::new();
static STDERR: OnceLock<WriterThread> = OnceLock::new();
static SYSLOG: OnceLock<WriterThread> = OnceLock::new();

impl Output {
    /// Where bytes are written to.
    fn descriptor(&self) -> BorrowedFd<'_> {
        match self {
            Output::File(file) => file.as_fd(),
            Output::Stderr => rustix::stdio::stderr(),
            Output::Syslog(_) | Output::Stream(_) => unreachable!("messages are sent"),
        }
    }

    /// The thread that writes to it.
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
    /// The thread of this place, started when it is first asked for.
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
        // Those that were large lately. Each is there once, and none that nobody else holds any more.
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

/// Waits until everything that was logged is written, or until the deadline.
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
        // A server that has failed is not waited for.
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
        // More than a pipe holds, which is no multiple of a line.
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
            // As if the thread had been told already: it stays out of this.
            queue.is_scheduled = true;
            (0..bytes / line.len()).for_each(|_| queue.bytes.extend_from_slice(&line));
        };
        let capacity = || writer.queue.lock().bytes.capacity();
        let mut spare = Vec::new();

        // What is usual is kept, and never looked after.
        burst(BATCH_BYTES_USUAL);
        writer.write_batch(&mut spare);
        assert!(!writer.is_swollen());

        burst(QUEUE_BYTES_MAX);
        burst(1000);
        writer.write_batch(&mut spare);
        burst(QUEUE_BYTES_MAX);
        writer.write_batch(&mut spare);
        assert!(writer.is_swollen() && capacity() >= QUEUE_BYTES_MAX, "{}", capacity());

        // While it goes on nothing is given back that would have to be taken again.
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
