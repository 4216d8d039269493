//! Access logs whose names have variables: `access_log /var/log/$host.log`.
//! (<https://nginx.org/en/docs/http/ngx_http_log_module.html#access_log>)
//!
//! The file of a line is known when the request ends. A separate thread opens the file, writes all lines gathered for
//! it, and closes it, or keeps it open for a while with `open_log_file_cache`. As in nginx nothing is written unless
//! the request's document root (`root`) exists. So an invented host name creates no file if `root` contains the
//! variable as well; otherwise it creates one. The queue is bounded; lines that do not fit are dropped, counted and
//! reported.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use gale_base::os_error::OsErrorText;
use parking_lot::{Condvar, Mutex};

use super::ErrorLog;
use gale_base::log_level::Level;

/// Bytes that may wait, including names; the same as for a file.
const QUEUE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Shortest interval between reports of lost lines, and of write errors by directory.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Most directories with reported errors, since clients may invent names.
const TOLD_MAX: usize = 64;

/// A line with its file.
#[derive(Debug)]
pub struct NamedLine {
    /// The file.
    pub path: PathBuf,
    /// The directory that must exist.
    pub root: PathBuf,
    /// The line with its line end.
    pub line: Vec<u8>,
    /// Number of the connection, for messages.
    pub connection: u64,
    /// Error log for messages.
    pub errors: Arc<ErrorLog>,
    /// Cache of open files.
    pub open: Option<Arc<OpenLogs>>,
}

/// `open_log_file_cache max=N [inactive=TIME] [min_uses=N] [valid=TIME]`, with the open files.
#[derive(Debug)]
pub struct OpenLogs {
    /// Most open files; the least recently used one is closed for another.
    pub files_max: usize,
    /// Time after which an unused file is closed.
    pub inactive: Duration,
    /// Uses within that time that keep a file open.
    pub uses_min: u32,
    /// Time for which the name is assumed to refer to the same file.
    pub valid: Duration,
    files: Mutex<HashMap<PathBuf, OpenLog>>,
}

#[derive(Debug)]
struct OpenLog {
    /// Present while it is used often enough.
    file: Option<File>,
    uses: u32,
    used: Instant,
    checked: Instant,
}

impl OpenLogs {
    /// An empty cache.
    pub fn new(files_max: usize, inactive: Duration, uses_min: u32, valid: Duration) -> OpenLogs {
        OpenLogs { files_max, inactive, uses_min, valid, files: Mutex::default() }
    }

    /// Writes to the file, opening it if needed.
    fn write(&self, path: &Path, lines: &[u8], now: Instant) -> Result<(), Failure> {
        let mut files = self.files.lock();
        files.retain(|_, open| now.duration_since(open.used) < self.inactive);
        let mut open = files.remove(path).unwrap_or(OpenLog { file: None, uses: 0, used: now, checked: now });
        if now.duration_since(open.checked) >= self.valid {
            open.checked = now;
            open.file = open.file.filter(|file| leads_to(path, file));
        }
        let mut file = match open.file.take() {
            Some(file) => file,
            None => open_file(path)?,
        };
        let written = file.write_all(lines).map_err(Failure::Write);
        open.uses = open.uses.saturating_add(1);
        open.used = now;
        open.file = (open.uses >= self.uses_min && written.is_ok()).then_some(file);
        if files.len() >= self.files_max
            && let Some(oldest) = files.iter().min_by_key(|(_, open)| open.used).map(|(path, _)| path.clone())
        {
            files.remove(&oldest);
        }
        files.insert(path.to_owned(), open);
        written
    }
}

/// `true` if the name still refers to the open file.
fn leads_to(path: &Path, file: &File) -> bool {
    let identity = |metadata: io::Result<std::fs::Metadata>| metadata.ok().map(|found| (found.dev(), found.ino()));
    identity(std::fs::metadata(path)).is_some_and(|found| identity(file.metadata()) == Some(found))
}

enum Failure {
    Open(io::Error),
    Write(io::Error),
}

fn open_file(path: &Path) -> Result<File, Failure> {
    let mut options = File::options();
    // Opening a FIFO without a reader then fails at once.
    options.append(true).create(true).mode(0o644).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    options.open(path).map_err(Failure::Open)
}

struct Thread {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    lines: Vec<NamedLine>,
    bytes: usize,
    is_writing: bool,
    lost: u64,
    reported: Option<Instant>,
}

static THREAD: OnceLock<Option<Thread>> = OnceLock::new();

/// Appends a line to be written soon. Never waits for a file.
pub fn append_named(line: NamedLine) {
    let thread = THREAD.get_or_init(|| {
        let started = std::thread::Builder::new().name("log named".to_owned()).spawn(run).is_ok();
        started.then(|| Thread { queue: Mutex::default(), changed: Condvar::new() })
    });
    // Without the thread the line cannot be written.
    let Some(thread) = thread else { return };
    let size = line.line.len() + line.path.as_os_str().len() + line.root.as_os_str().len() + size_of::<NamedLine>();
    let mut queue = thread.queue.lock();
    if queue.bytes + size > QUEUE_BYTES_MAX {
        queue.lost += 1;
        let lost = queue.lost;
        if queue.reported.is_none_or(|last| last.elapsed() >= REPORT_INTERVAL) {
            queue.reported = Some(Instant::now());
            drop(queue);
            let message =
                format!("writing to logs with variables in their names is too slow, {lost} lines lost so far");
            line.errors.write(Level::Alert, None, &message);
        }
        return;
    }
    queue.bytes += size;
    queue.lines.push(line);
    thread.changed.notify_all();
}

/// Waits until everything is written, or until the deadline.
pub(super) fn finish(deadline: Instant) {
    let Some(Some(thread)) = THREAD.get() else { return };
    let mut queue = thread.queue.lock();
    while !queue.lines.is_empty() || queue.is_writing {
        if thread.changed.wait_until(&mut queue, deadline).timed_out() {
            return;
        }
    }
}

fn run() {
    gale_runtime::affinity::leave_processors();
    // The thread may start before its place is set.
    let Some(thread) = THREAD.wait() else { return };
    let mut told = Told::default();
    loop {
        let lines = {
            let mut queue = thread.queue.lock();
            queue.is_writing = false;
            thread.changed.notify_all();
            while queue.lines.is_empty() {
                thread.changed.wait(&mut queue);
            }
            queue.is_writing = true;
            queue.bytes = 0;
            std::mem::take(&mut queue.lines)
        };
        write_lines(lines, &mut told);
    }
}

/// Directories with reported write errors, and the times of the reports.
#[derive(Default)]
struct Told(HashMap<PathBuf, Instant>);

impl Told {
    /// `true` if an error in this file's directory should be reported. (nginx reports once a minute for each
    /// `access_log`.)
    fn is_due(&mut self, path: &Path, now: Instant) -> bool {
        let directory = path.parent().unwrap_or(path);
        self.0.retain(|_, told| now.duration_since(*told) < REPORT_INTERVAL);
        let is_due = self.0.len() < TOLD_MAX && !self.0.contains_key(directory);
        if is_due {
            self.0.insert(directory.to_owned(), now);
        }
        is_due
    }
}

/// Writes all lines of each file with one call; files are in the order of their first lines.
fn write_lines(lines: Vec<NamedLine>, told: &mut Told) {
    let mut places: HashMap<PathBuf, usize> = HashMap::new();
    let mut batches: Vec<NamedLine> = Vec::new();
    for line in lines {
        match places.get(&line.path) {
            Some(&place) => batches[place].line.extend_from_slice(&line.line),
            None => {
                places.insert(line.path.clone(), batches.len());
                batches.push(line);
            }
        }
    }
    for batch in batches {
        write_batch(&batch, told);
    }
}

fn write_batch(batch: &NamedLine, told: &mut Told) {
    let NamedLine { path, root, line, connection, errors, open } = batch;
    let complain = |level, what: String, error: &io::Error| {
        let message = format!("{what} failed {} while logging request", OsErrorText(error));
        errors.write(level, Some(*connection), &message);
    };
    let tested = match std::fs::metadata(root) {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::ENOTDIR)),
        Err(error) => Err(error),
    };
    if let Err(error) = tested {
        return complain(Level::Error, format!("testing \"{}\" existence", root.display()), &error);
    }
    let written = match open {
        Some(open) => open.write(path, line, Instant::now()),
        None => open_file(path).and_then(|mut file| file.write_all(line).map_err(Failure::Write)),
    };
    match written {
        Ok(()) => {}
        Err(Failure::Open(error)) => complain(Level::Crit, format!("open() \"{}\"", path.display()), &error),
        Err(Failure::Write(_)) if !told.is_due(path, Instant::now()) => {}
        Err(Failure::Write(error)) => complain(Level::Alert, format!("write() to \"{}\"", path.display()), &error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_each_directory_it_is_told_once_a_minute_that_writing_fails() {
        let (mut told, begin) = (Told::default(), Instant::now());
        let mut is_due = |path: &str, seconds| told.is_due(Path::new(path), begin + Duration::from_secs(seconds));
        assert!(is_due("/full/a", 0) && !is_due("/full/b", 59) && is_due("/other/a", 59) && is_due("/full/a", 60));
        let made_up: Vec<bool> = (0..100).map(|number| is_due(&format!("/{number}/a"), 61)).collect();
        assert_eq!(made_up.iter().filter(|&&is_due| is_due).count(), TOLD_MAX - 2);
    }

    #[test]
    fn a_file_stays_open_when_it_is_used_often_and_is_found_again_when_it_was_moved() {
        let directory = std::env::temp_dir().join(format!("gale-named-log-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let (one, other, moved) = (directory.join("one"), directory.join("other"), directory.join("moved"));
        let minute = Duration::from_secs(60);
        let open = OpenLogs::new(1, minute, 2, minute);
        let now = Instant::now();
        let write = |path: &Path, text: &[u8], now| assert!(open.write(path, text, now).is_ok());
        let is_open = |path: &Path| open.files.lock().get(path).is_some_and(|open| open.file.is_some());
        write(&one, b"1\n", now);
        assert!(!is_open(&one), "once is not often enough");
        write(&one, b"2\n", now);
        assert!(is_open(&one));
        std::fs::rename(&one, &moved).unwrap();
        write(&one, b"3\n", now);
        write(&one, b"4\n", now + minute / 2);
        write(&one, b"5\n", now + minute);
        assert_eq!(std::fs::read(&moved).unwrap(), b"1\n2\n3\n4\n");
        assert_eq!(std::fs::read(&one).unwrap(), b"5\n");
        write(&other, b"x\n", now + minute);
        assert_eq!(open.files.lock().len(), 1, "one makes room for the other");
        write(&other, b"y\n", now + minute * 3);
        assert_eq!(open.files.lock()[&other].uses, 1, "unused for too long, it is forgotten");
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
