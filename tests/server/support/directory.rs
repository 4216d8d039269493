//! A directory for one test: files, the service manager's socket, addresses, and a watch for changes.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use super::DEADLINE;
use super::crowds::raise_descriptor_limit;

/// Number of addresses of each directory.
const ADDRESSES: u32 = 3;
/// First port. With [`DIRECTORIES_OF_HOST`] directories the last port is below 32768, where the kernel's range of
/// ephemeral ports begins.
const PORT_FIRST: u32 = 10_000;
const DIRECTORIES_OF_HOST: u32 = 7_000;
/// Host addresses of this process: its process number, which has 22 bits, within 127.64.0.0/10, 127.128.0.0/10 and
/// 127.192.0.0/10.
const HOSTS: [u32; 3] = [0x7f40_0000, 0x7f80_0000, 0x7fc0_0000];

/// Removed when dropped.
pub struct Directory {
    path: PathBuf,
    number: u32,
    watch: Watch,
}

impl Directory {
    pub fn new() -> Directory {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        raise_descriptor_limit();
        let path = std::env::temp_dir().join(format!("gale-test-{}-{number}", std::process::id()));
        // A killed process with the same number may have left its directory behind.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a directory");
        // Shared with a worker or a server that runs as another user.
        rustix::fs::chmod(&path, 0o777.into()).expect("ours");
        let watch = Watch::new(&path);
        Directory { path, number, watch }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The address behind `%TCP%` (1), `%TCP2%` or `%TCP3%`.
    pub fn address(&self, number: usize) -> SocketAddr {
        let number = u32::try_from(number - 1).ok().filter(|&number| number < ADDRESSES).expect("one of three");
        let host = HOSTS.get((self.number / DIRECTORIES_OF_HOST) as usize).expect("addresses for so many directories");
        let host = Ipv4Addr::from(host | (std::process::id() & 0x3f_ffff));
        let port = PORT_FIRST + self.number % DIRECTORIES_OF_HOST * ADDRESSES + number;
        SocketAddr::from((host, u16::try_from(port).expect("below 32768")))
    }

    /// `text` with the placeholders replaced by this directory's names and addresses.
    pub fn replaced(&self, text: &str) -> String {
        let directory = self.path.to_str().expect("a path of text");
        text.replace("%DIR%", directory)
            .replace("%UNIX%", &format!("unix:{directory}/gale.sock"))
            .replace("%TCP%", &self.address(1).to_string())
            .replace("%TCP2%", &self.address(2).to_string())
            .replace("%TCP3%", &self.address(3).to_string())
            .replace("%PORT%", &self.address(1).port().to_string())
    }

    /// Writes a file and creates its parent directories.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        let path = self.path.join(name);
        fs::create_dir_all(path.parent().expect("below our directory")).expect("directories");
        fs::write(path, contents).expect("written");
    }

    pub fn create(&self, name: &str) -> File {
        File::create(self.path.join(name)).expect("created")
    }

    #[track_caller]
    pub fn read(&self, name: &str) -> String {
        self.try_read(name).unwrap_or_else(|| panic!("{name} is there"))
    }

    pub fn try_read(&self, name: &str) -> Option<String> {
        fs::read(self.path.join(name)).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Socket to which the server sends its state (`NOTIFY_SOCKET`).
    pub fn notify_socket(&self) -> UnixDatagram {
        let path = self.path.join("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        rustix::fs::chmod(&path, 0o666.into()).expect("ours");
        socket.set_nonblocking(true).expect("an option");
        socket
    }

    /// Waits until a line of the file contains `text`, and returns it. Earlier lines count.
    #[track_caller]
    pub fn wait_line(&self, name: &str, text: &str) -> String {
        let mut found = None;
        self.wait_until(&format!("a line with \"{text}\" in {name}"), |directory| {
            let contents = directory.try_read(name).unwrap_or_default();
            // A line counts once its line feed is written.
            let whole = contents.rfind('\n').map_or("", |end| &contents[..end]);
            found = whole.lines().find(|line| line.contains(text)).map(str::to_owned);
            found.is_some()
        });
        found.expect("waited for")
    }

    /// Waits for a condition that can only become true when a file of the directory changes.
    #[track_caller]
    pub fn wait_until(&self, what: &str, mut is_true: impl FnMut(&Directory) -> bool) {
        let end = Instant::now() + DEADLINE;
        loop {
            // Cleared before the check: a later change is reported again.
            self.watch.clear();
            if is_true(self) {
                return;
            }
            let error_log = || self.try_read("error.log").unwrap_or_default();
            assert!(self.watch.wait(end), "no {what} in time\n{}", error_log());
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Watches a directory for files that are written, created, renamed and removed.
pub struct Watch {
    descriptor: OwnedFd,
}

impl Watch {
    pub fn new(path: &Path) -> Watch {
        let descriptor = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).expect("inotify");
        let events = WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::DELETE;
        inotify::add_watch(&descriptor, path, events).expect("a watch");
        Watch { descriptor }
    }

    /// Forgets the changes noticed so far.
    pub fn clear(&self) {
        while rustix::io::read(&self.descriptor, &mut [0u8; 4096]).is_ok() {}
    }

    /// Waits until a change is noticed; false at `end`.
    pub fn wait(&self, end: Instant) -> bool {
        wait_readable_any(&self.descriptor, None::<&OwnedFd>, end)
    }
}

/// `true` if one of two descriptors becomes readable before `end`.
pub(super) fn wait_readable_any(one: &impl AsFd, other: Option<&impl AsFd>, end: Instant) -> bool {
    let left = end.saturating_duration_since(Instant::now());
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    let mut polled = vec![PollFd::new(one, PollFlags::IN)];
    polled.extend(other.map(|other| PollFd::new(other, PollFlags::IN)));
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, Some(&timeout))).is_ok_and(|ready| ready > 0)
}

/// `true` if the descriptor is readable now.
pub(super) fn is_readable(descriptor: &impl AsFd) -> bool {
    wait_readable_any(descriptor, None::<&OwnedFd>, Instant::now())
}
