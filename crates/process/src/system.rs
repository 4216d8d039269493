//! `Resources` from the system: opens, reads, looks up, and records the results. The record becomes the bundle.
//!
//! Used where blocking is allowed: at the start, in the helper of a reload, for `-t` and with `master_process off`.
//! Sockets that are already open are adopted by address, never opened twice, and not changed before the configuration
//! is accepted.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_config::Files;
use rustix::process::Pid;

use super::bundle::{AccountEntry, Bundle, Record};
use super::data_file::{DataFile, DataHandle};
use super::errors::{ErrorLog, ResourceError, errno_text};
use super::listen::{self, ListenAddress, ListenSpec, Listener, ListenerHandle, OpenedBy};
use super::lock_file::{LockFile, LockHandle};
use super::log_file::{LogFile, LogHandle};
use super::program::BuildRequest;
use super::resources::Resources;
use super::settings::ProcessSettings;
use super::user::{self, Account};

/// nginx tries to bind five times.
const BIND_TRIES: usize = 5;
/// Pause after each failed try, as in nginx.
const BIND_PAUSE: Duration = Duration::from_millis(500);
/// Maximum size in bytes of a file that a configuration includes or uses as a key.
const FILE_SIZE_MAX: u64 = 128 << 20;

/// See the head of the file.
pub struct SystemResources {
    record: Record,
    existing: Vec<ListenerHandle>,
    log: Arc<dyn ErrorLog>,
    test: bool,
    bind_pause: Duration,
}

impl SystemResources {
    /// Returns resources for a first start: no socket is open yet.
    pub fn new(log: Arc<dyn ErrorLog>) -> SystemResources {
        SystemResources { record: Record::default(), existing: Vec::new(), log, test: false, bind_pause: BIND_PAUSE }
    }

    /// Adapts it for `-t`: an address in use is no error, and nothing is left behind.
    pub fn for_test(mut self) -> SystemResources {
        self.test = true;
        self
    }

    /// Sets the open sockets to use for the same addresses.
    pub fn with_existing(mut self, listeners: Vec<ListenerHandle>) -> SystemResources {
        self.existing = listeners;
        self
    }

    /// Sets the pause between two tries to bind, instead of nginx's 500 ms.
    pub fn with_bind_pause(mut self, pause: Duration) -> SystemResources {
        self.bind_pause = pause;
        self
    }

    /// Returns the recorded resources as a bundle.
    pub fn into_bundle(self, request: BuildRequest, settings: ProcessSettings) -> Bundle {
        Bundle { generation: 1, request, settings, record: self.record }
    }

    /// Removes files of Unix sockets opened for a configuration that is not used.
    pub(super) fn abandon(self) {
        self.new_socket_files().remove(&*self.log);
    }

    /// Returns the files of Unix sockets that were opened, not adopted. The caller must remove them if the
    /// configuration is not used.
    pub(super) fn new_socket_files(&self) -> NewSocketFiles {
        let listeners = self.record.listeners.iter().map(|listener| &**listener);
        self.new_among(listeners)
    }

    fn new_among<'l>(&self, listeners: impl Iterator<Item = &'l Listener>) -> NewSocketFiles {
        let is_new = |listener: &&Listener| !self.test && !listener.sockets.is_empty() && !self.was_open(listener);
        NewSocketFiles { addresses: listeners.filter(is_new).map(|listener| listener.spec.address.clone()).collect() }
    }

    /// Opens the missing sockets of `listener`; returns `true` if an address was in use.
    fn complete(&self, listener: &mut Listener) -> Result<bool, ResourceError> {
        let wanted = if self.test { 1 } else { listener.spec.socket_count() };
        while listener.sockets.len() < wanted {
            let mut spec = listener.spec.clone();
            // If the kernel chose the port, further sockets use the same one.
            if !listener.sockets.is_empty()
                && let Ok(address) = listener.local_address()
            {
                spec.address = address;
            }
            let open = || listen::open_socket(&spec, spec.reuseport > 0, self.test);
            let opened = match open() {
                Err(error) if error.in_use && !self.test && self.remove_stale(&spec.address) => open(),
                opened => opened,
            };
            match opened {
                Ok(socket) => listener.sockets.push(Arc::new(socket)),
                Err(error) if error.in_use && self.test => return Ok(false),
                Err(error) if error.in_use => {
                    self.log.write(Level::Emerg, &error.message);
                    return Ok(true);
                }
                Err(error) => return Err(ResourceError::new(error.message)),
            }
        }
        Ok(false)
    }

    /// Removes the socket file of a killed process, which would block the address forever, if connections to it are
    /// refused. Returns `true` if so.
    fn remove_stale(&self, address: &ListenAddress) -> bool {
        let ListenAddress::Unix(path) = address else {
            return false;
        };
        let is_stale = listen::refuses_connections(path);
        if is_stale {
            self.log.write(Level::Notice, &format!("deleting socket {}, on which no process listens", path.display()));
            remove_file_of(address, &*self.log);
        }
        is_stale
    }

    /// Opens all missing sockets, with up to five tries.
    fn complete_all(&self, listeners: &mut [Listener]) -> Result<(), ResourceError> {
        for _ in 0..BIND_TRIES {
            let mut in_use = false;
            for listener in &mut *listeners {
                in_use |= self.complete(listener)?;
            }
            if !in_use {
                return Ok(());
            }
            let milliseconds = self.bind_pause.as_millis();
            self.log.write(Level::Notice, &format!("try again to bind() after {milliseconds}ms"));
            std::thread::sleep(self.bind_pause);
        }
        Err(ResourceError::new("still could not bind()"))
    }

    /// Returns a listener with the open sockets of this address.
    fn adopt(&self, spec: &ListenSpec) -> Listener {
        // An inherited socket, or one whose port the kernel chose, is identified by the address that it is bound to.
        let is_there = |old: &&ListenerHandle| {
            let bound = || old.local_address().is_ok_and(|address| address == spec.address);
            old.spec.kind == spec.kind && (old.spec.address == spec.address || bound())
        };
        let known = self.existing.iter().find(is_there);
        let Some(old) = known else {
            return Listener { spec: spec.clone(), sockets: Vec::new(), opened_by: OpenedBy::Us };
        };
        if spec.reuseport > 0 && (old.spec.reuseport == 0 || old.opened_by != OpenedBy::Us) {
            for socket in &old.sockets {
                if let Err(error) = listen::share_port(socket) {
                    let why = errno_text(&error);
                    let text = format!("setsockopt(SO_REUSEPORT) {} failed{why}, ignored", spec.address);
                    self.log.write(Level::Alert, &text);
                }
            }
        }
        if old.opened_by == OpenedBy::ServiceManager
            && old.sockets.iter().any(|socket| listen::differs_in_families(spec, socket))
        {
            let (theirs, ours) = if spec.ipv6only { ("off", "on") } else { ("on", "off") };
            let text = format!(
                "the socket passed for {} has ipv6only={theirs}, \"listen\" says {ours}, ignored",
                spec.address
            );
            self.log.write(Level::Warn, &text);
        }
        if old.sockets.iter().any(|socket| listen::differs_in_paths(spec, socket)) {
            let (theirs, ours) = if spec.multipath { ("without", "with") } else { ("with", "without") };
            let text = format!(
                "the open socket of {} is {theirs} \"multipath\", \"listen\" is {ours} it, ignored until a restart",
                spec.address
            );
            self.log.write(Level::Warn, &text);
        }
        Listener { spec: spec.clone(), sockets: old.sockets.clone(), opened_by: old.opened_by }
    }

    fn was_open(&self, listener: &Listener) -> bool {
        let first = listener.sockets.first();
        let holds = |old: &ListenerHandle| {
            old.sockets.iter().any(|socket| first.is_some_and(|first| Arc::ptr_eq(first, socket)))
        };
        self.existing.iter().any(holds)
    }
}

impl Files for SystemResources {
    fn read(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        let result = read_bounded(path);
        self.record.texts.insert(path.to_owned(), recorded(&result));
        result
    }

    fn glob(&mut self, pattern: &Path) -> io::Result<Vec<PathBuf>> {
        let result = gale_config::DiskFiles.glob(pattern);
        self.record.globs.insert(pattern.to_owned(), recorded(&result));
        result
    }
}

impl Resources for SystemResources {
    fn listeners(&mut self, specs: &[ListenSpec]) -> Result<Vec<ListenerHandle>, ResourceError> {
        let mut listeners: Vec<Listener> = specs.iter().map(|spec| self.adopt(spec)).collect();
        if let Err(error) = self.complete_all(&mut listeners) {
            self.new_among(listeners.iter()).remove(&*self.log);
            return Err(error);
        }
        // Sockets in service are configured when the new configuration comes into force; see the master.
        for listener in listeners.iter().filter(|listener| !self.test && !self.was_open(listener)) {
            listen::configure(listener, None, &*self.log);
        }
        let handles: Vec<ListenerHandle> = listeners.into_iter().map(Arc::new).collect();
        self.record.listeners.extend(handles.iter().cloned());
        Ok(handles)
    }

    fn log_file(&mut self, path: &Path) -> Result<LogHandle, ResourceError> {
        if let Some(open) = self.record.log(path) {
            return Ok(Arc::clone(open));
        }
        let file = LogFile::open(path).map_err(|error| {
            ResourceError::new(format!("open() \"{}\" failed{}", path.display(), errno_text(&error)))
        })?;
        let handle = Arc::new(file);
        self.record.logs.push(Arc::clone(&handle));
        Ok(handle)
    }

    fn lock_file(&mut self, path: &Path) -> Result<LockHandle, ResourceError> {
        if let Some(open) = self.record.lock(path) {
            return Ok(Arc::clone(open));
        }
        let file = LockFile::open(path).map_err(|error| {
            ResourceError::new(format!("open() \"{}\" failed{}", path.display(), errno_text(&error)))
        })?;
        let handle = Arc::new(file);
        self.record.locks.push(Arc::clone(&handle));
        Ok(handle)
    }

    fn secret(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        // A file is read only once for a configuration, however often it is used: it may be a pipe, or change
        // meanwhile.
        if let Some(Ok(known)) = self.record.secrets.get(path) {
            return Ok(known.clone());
        }
        let result = read_bounded(path);
        self.record.secrets.insert(path.to_owned(), recorded(&result));
        result
    }

    fn data_file(&mut self, path: &Path) -> io::Result<DataHandle> {
        if let Some(known) = self.record.data_file(path) {
            return Ok(Arc::clone(known));
        }
        let handle = Arc::new(DataFile::copy(path)?);
        self.record.data_files.push(Arc::clone(&handle));
        Ok(handle)
    }

    fn resolve(&mut self, host: &str) -> io::Result<Vec<IpAddr>> {
        let result = (host, 0).to_socket_addrs().map(|found| {
            let mut addresses: Vec<IpAddr> = found.map(|address| address.ip()).collect();
            let mut seen = HashSet::new();
            addresses.retain(|address| seen.insert(*address));
            addresses
        });
        let recorded = result.as_ref().map(Clone::clone).map_err(ToString::to_string);
        self.record.names.insert(host.to_owned(), recorded);
        result
    }

    fn account(&mut self, user: &str, group: Option<&str>) -> Result<Option<Account>, ResourceError> {
        let found = if user::is_super_user() { Some(Account::look_up(user, group)?) } else { None };
        let entry = AccountEntry { user: user.to_owned(), group: group.map(str::to_owned), found: found.clone() };
        self.record.accounts.push(entry);
        Ok(found)
    }

    fn directory(&mut self, path: &Path, owner: Option<&Account>) -> Result<(), ResourceError> {
        let name = path.display();
        let failed =
            |call: String| move |error: io::Error| ResourceError::new(format!("{call} failed{}", errno_text(&error)));
        // A directory without an owner is only the parent of others' directories.
        let mode = if owner.is_some() { 0o700 } else { 0o755 };
        match std::fs::DirBuilder::new().mode(mode).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(format!("mkdir() \"{name}\""))(error));
            }
            _ => {}
        }
        let Some(owner) = owner.filter(|_| user::is_super_user()) else {
            return Ok(());
        };
        let metadata = std::fs::metadata(path).map_err(failed(format!("stat() \"{name}\"")))?;
        if metadata.uid() != owner.user {
            take_along(path, metadata.uid(), owner);
            std::os::unix::fs::chown(path, Some(owner.user), None)
                .map_err(failed(format!("chown(\"{name}\", {})", owner.user)))?;
        }
        if metadata.mode() & 0o700 != 0o700 {
            let mode = std::fs::Permissions::from_mode((metadata.mode() | 0o700) & 0o7777);
            std::fs::set_permissions(path, mode).map_err(failed(format!("chmod() \"{name}\"")))?;
        }
        Ok(())
    }
}

/// Files of Unix sockets opened for a configuration that may still be rejected.
#[must_use]
pub(super) struct NewSocketFiles {
    addresses: Vec<ListenAddress>,
}

impl NewSocketFiles {
    /// Removes them, because the configuration is not used.
    pub fn remove(&self, log: &dyn ErrorLog) {
        self.addresses.iter().for_each(|address| remove_file_of(address, log));
    }
}

/// Maximum number of entries examined in a directory that changes its owner.
const TAKEN_ALONG_MAX: usize = 10_000;

/// Changes the owner of the files in a directory that changes its owner: of all files of the former owner, unless that
/// is root; of root's files only Gale's own (`.gale.journal`, `.gale.lock`). Otherwise a cache or an ACME issuer could
/// not access its own state after `user` has changed. A file whose owner cannot be changed is reported by the worker
/// that fails to open it.
fn take_along(directory: &Path, former: u32, owner: &Account) {
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for entry in entries.take(TAKEN_ALONG_MAX).flatten() {
        let is_own = entry.file_name().as_encoded_bytes().starts_with(b".gale.");
        if is_own || former != 0 {
            let _ = give_file(&entry.path(), former, owner);
        }
    }
}

/// Changes the owner of a regular file that belongs to the former owner. A symbolic link or a file with several hard
/// links is skipped: it may be a file outside the directory.
fn give_file(path: &Path, former: u32, owner: &Account) -> io::Result<()> {
    use rustix::fs::{Gid, Mode, OFlags, Uid, fchown, open};
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = std::fs::File::from(open(path, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    if metadata.is_file() && metadata.nlink() == 1 && metadata.uid() == former {
        fchown(&file, Some(Uid::from_raw(owner.user)), None::<Gid>)?;
    }
    Ok(())
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read;
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(FILE_SIZE_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_SIZE_MAX {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    Ok(bytes)
}

fn recorded<T: Clone>(result: &io::Result<T>) -> Result<T, i32> {
    match result {
        Ok(value) => Ok(value.clone()),
        Err(error) => Err(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}

/// Removes the socket file of a listener that is no longer served, if it is ours.
pub(super) fn remove_socket_file(listener: &Listener, log: &dyn ErrorLog) {
    if listener.opened_by != OpenedBy::ServiceManager {
        remove_file_of(&listener.spec.address, log);
    }
}

fn remove_file_of(address: &ListenAddress, log: &dyn ErrorLog) {
    let ListenAddress::Unix(path) = address else {
        return;
    };
    if let Err(error) = std::fs::remove_file(path) {
        log.write(Level::Emerg, &format!("unlink() {} failed{}", path.display(), errno_text(&error)));
    }
}

/// Returns the hard limit on descriptors of a process; `None` if it cannot be read.
pub(super) fn descriptors_max_of(pid: Pid) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: without a new limit the call only writes the present one to the pointer, which is valid.
    let code =
        unsafe { libc::prlimit(pid.as_raw_nonzero().get(), libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut limit) };
    (code == 0).then_some(limit.rlim_max)
}

/// Removes the socket files of addresses that are not in `current`.
pub(super) fn remove_old_socket_files(addresses: &[ListenAddress], current: &Bundle, log: &dyn ErrorLog) {
    let served =
        |address: &ListenAddress| current.record.listeners.iter().any(|listener| listener.spec.address == *address);
    for address in addresses.iter().filter(|address| !served(address)) {
        if let ListenAddress::Unix(path) = address {
            log.write(Level::Warn, &format!("deleting socket {}", path.display()));
        }
        remove_file_of(address, log);
    }
}

/// Removes the socket files that `rejected` opened and `current` does not serve.
pub(super) fn remove_rejected_socket_files(rejected: &Bundle, current: &Bundle, log: &dyn ErrorLog) {
    for listener in &rejected.record.listeners {
        if !current.record.listeners.iter().any(|mine| mine.spec.address == listener.spec.address) {
            remove_socket_file(listener, log);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Lines(Mutex<Vec<String>>);

    impl ErrorLog for Lines {
        fn write(&self, level: Level, message: &str) {
            self.0.lock().expect("no panic").push(format!("[{}] {message}", level.name()));
        }
    }

    fn any_port() -> ListenSpec {
        ListenSpec::new(ListenAddress::Inet("127.0.0.1:0".parse().expect("an address")))
    }

    #[test]
    fn an_address_in_use_is_tried_five_times() {
        let lines = Arc::new(Lines::default());
        let mut first = SystemResources::new(lines.clone());
        let address = first.listeners(&[any_port()]).expect("free")[0].local_address().expect("bound");
        let mut second = SystemResources::new(lines.clone()).with_bind_pause(Duration::ZERO);
        let error = second.listeners(&[ListenSpec::new(address.clone())]).expect_err("taken");
        assert_eq!(error.to_string(), "still could not bind()");
        let lines = lines.0.lock().expect("no panic");
        let expected = format!("[emerg] bind() to {address} failed (98: Address already in use)");
        assert_eq!(lines.iter().filter(|line| **line == expected).count(), BIND_TRIES);
    }

    #[test]
    fn socket_files_do_not_outlive_a_failure_and_stale_ones_are_no_obstacle() {
        let lines = Arc::new(Lines::default());
        let resources = || SystemResources::new(lines.clone()).with_bind_pause(Duration::ZERO);
        let mut first = resources();
        let taken = first.listeners(&[any_port()]).expect("free")[0].local_address().expect("bound");
        let path = std::env::temp_dir().join(format!("gale-stale-{}.sock", std::process::id()));
        let unix = [ListenSpec::new(ListenAddress::Unix(path.clone()))];
        resources().listeners(&[unix[0].clone(), ListenSpec::new(taken)]).expect_err("one is taken");
        assert!(!path.exists());
        let served = resources().listeners(&unix).expect("opened");
        resources().listeners(&unix).expect_err("a socket listens there");
        drop(served);
        assert!(path.exists(), "as a killed process leaves it");
        let mut last = resources();
        last.listeners(&unix).expect("the stale one is replaced");
        last.abandon();
        assert!(!path.exists());
    }

    #[test]
    fn a_test_ignores_an_address_in_use() {
        let lines = Arc::new(Lines::default());
        let mut first = SystemResources::new(lines.clone());
        let address = first.listeners(&[any_port()]).expect("free")[0].local_address().expect("bound");
        let mut test = SystemResources::new(lines.clone()).for_test();
        test.listeners(&[ListenSpec::new(address)]).expect("not an error");
        assert!(lines.0.lock().expect("no panic").is_empty());
    }

    #[test]
    fn open_sockets_are_adopted_by_address_and_joined_for_reuseport() {
        let lines = Arc::new(Lines::default());
        let open = SystemResources::new(lines.clone()).listeners(&[any_port()]).expect("free");
        let more = ListenSpec { reuseport: 3, ..any_port() };
        let mut next = SystemResources::new(lines.clone()).with_existing(open.clone());
        let joined = next.listeners(&[more]).expect("shared");
        assert!(Arc::ptr_eq(&joined[0].sockets[0], &open[0].sockets[0]));
        assert_eq!(joined[0].sockets.len(), 3);
        let fewer = SystemResources::new(lines).with_existing(joined).listeners(&[any_port()]).expect("adopted");
        assert_eq!(fewer[0].sockets.len(), 3, "sockets of a configured address are kept");
    }
}
