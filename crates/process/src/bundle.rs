//! The bundle: the text of a configuration and everything that was opened or read for it, in a form that can be sent
//! over a socket.
//!
//! ```text
//!   memfd:   "GALEBNDL"  version u32  manifest length u64  │ manifest (JSON) │ contents of files, back to back
//!   beside:  descriptors of sockets, logs, lock files, data files and directories, referred to by index
//! ```
//!
//! A bundle is complete: building from it opens nothing. A bundle with a wrong version, length or index is refused as a
//! whole.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gale_config::Files;
use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};

use super::data_file::{DataFile, DataHandle, Origin};
use super::errors::ResourceError;
use super::listen::{self, ListenAddress, ListenSpec, Listener, ListenerHandle, OpenedBy};
use super::lock_file::{LockFile, LockHandle};
use super::log_file::{LogFile, LogHandle};
use super::program::BuildRequest;
use super::resources::Resources;
use super::sandbox::OpenPlace;
use super::settings::{ErrorLogDestination, ErrorLogOutput, ErrorLogSetting, ErrorLogTarget, ProcessSettings};
use super::text;
use super::user::Account;

/// Increased with every change of the manifest or of the messages on a link.
pub const PROTOCOL_VERSION: u32 = 11;

const MAGIC: &[u8; 8] = b"GALEBNDL";
const HEADER_LENGTH: usize = 8 + 4 + 8;
/// Maximum size of the memfd in bytes: far beyond any configuration, small enough to hold twice.
const SIZE_MAX: u64 = 512 << 20;

/// Everything that was opened and read while a configuration was built.
#[derive(Clone, Debug, Default)]
pub(super) struct Record {
    pub texts: BTreeMap<PathBuf, Result<Vec<u8>, i32>>,
    pub globs: BTreeMap<PathBuf, Result<Vec<PathBuf>, i32>>,
    pub secrets: BTreeMap<PathBuf, Result<Vec<u8>, i32>>,
    pub names: BTreeMap<String, Result<Vec<IpAddr>, String>>,
    pub accounts: Vec<AccountEntry>,
    pub listeners: Vec<ListenerHandle>,
    pub logs: Vec<LogHandle>,
    pub locks: Vec<LockHandle>,
    pub data_files: Vec<DataHandle>,
    /// Directories and files that worker processes may write to, in any order.
    pub places: Vec<OpenPlace>,
}

impl Record {
    /// Returns the log with this path. Compares paths byte by byte, as written when it was opened, which is fast for
    /// thousands.
    pub fn log(&self, path: &Path) -> Option<&LogHandle> {
        self.logs.iter().find(|log| log.path().as_os_str() == path.as_os_str())
    }

    pub fn lock(&self, path: &Path) -> Option<&LockHandle> {
        self.locks.iter().find(|lock| lock.path() == path)
    }

    pub fn data_file(&self, path: &Path) -> Option<&DataHandle> {
        self.data_files.iter().find(|file| file.path() == path)
    }
}

/// Result of one call of `Resources::account`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct AccountEntry {
    pub user: String,
    pub group: Option<String>,
    pub found: Option<Account>,
}

/// A configuration with everything it needs. See the head of the file.
#[derive(Clone, Debug)]
pub struct Bundle {
    /// Number of this configuration in its master, from 1.
    pub(super) generation: u64,
    pub(super) request: BuildRequest,
    pub(super) settings: ProcessSettings,
    pub(super) record: Record,
}

impl Bundle {
    /// Returns the request that it was built for.
    pub fn request(&self) -> &BuildRequest {
        &self.request
    }

    /// Returns the settings of the processes.
    pub fn settings(&self) -> &ProcessSettings {
        &self.settings
    }

    /// Returns resources for a build from this bundle.
    pub fn resources(&self) -> BundleResources<'_> {
        BundleResources { record: &self.record }
    }

    /// Returns the main error log's destinations, with their files.
    pub fn error_log_targets(&self) -> Vec<ErrorLogTarget> {
        let target = |setting: &ErrorLogSetting| {
            let output = match &setting.destination {
                ErrorLogDestination::Stderr => ErrorLogOutput::Stderr,
                ErrorLogDestination::Syslog(text) => ErrorLogOutput::Syslog(text.clone()),
                ErrorLogDestination::File(path) => ErrorLogOutput::File(Arc::clone(self.record.log(path)?)),
            };
            Some(ErrorLogTarget { level: setting.level, form: setting.form, output })
        };
        self.settings.error_log.iter().filter_map(target).collect()
    }

    /// Returns the file for standard error after the process has left its terminal: the first error log that is a file.
    pub(super) fn standard_error(&self) -> Option<LogHandle> {
        if self.settings.keeps_standard_error {
            return None;
        }
        self.error_log_targets().into_iter().find_map(|target| match target.output {
            ErrorLogOutput::File(file) => Some(file),
            _ => None,
        })
    }

    /// Replaces sockets, logs, lock files and copies of data files that `previous` holds, too, by *its* handles, so
    /// that both bundles share one `Arc` and the duplicate descriptor is closed.
    pub(super) fn adopt(&mut self, previous: &Bundle) {
        let mut known: BTreeMap<u64, Arc<OwnedFd>> = BTreeMap::new();
        for socket in previous.record.listeners.iter().flat_map(|listener| &listener.sockets) {
            if let Ok(identity) = listen::socket_identity(socket) {
                known.insert(identity, Arc::clone(socket));
            }
        }
        for listener in &mut self.record.listeners {
            let adopted = |socket: &Arc<OwnedFd>| {
                let identity = listen::socket_identity(socket).ok();
                identity.and_then(|identity| known.get(&identity)).unwrap_or(socket).clone()
            };
            let sockets: Vec<_> = listener.sockets.iter().map(adopted).collect();
            let same = previous.record.listeners.iter().find(|old| {
                old.spec == listener.spec
                    && old.sockets.len() == sockets.len()
                    && old.sockets.iter().zip(&sockets).all(|(old, new)| Arc::ptr_eq(old, new))
            });
            *listener = match same {
                Some(old) => Arc::clone(old),
                None => Arc::new(Listener { sockets, ..Listener::clone(listener) }),
            };
        }
        for log in &mut self.record.logs {
            if let Some(old) = previous.record.logs.iter().find(|old| old.is_same_file(log)) {
                *log = Arc::clone(old);
            }
        }
        for lock in &mut self.record.locks {
            if let Some(old) = previous.record.locks.iter().find(|old| old.is_same_file(lock)) {
                *lock = Arc::clone(old);
            }
        }
        for file in &mut self.record.data_files {
            if let Some(old) = previous.record.data_files.iter().find(|old| old.is_same_copy(file)) {
                *file = Arc::clone(old);
            }
        }
    }

    /// Returns how this listener's sockets were configured in this bundle, if they were in it.
    pub(super) fn spec_of(&self, listener: &Listener) -> Option<&ListenSpec> {
        let first = listener.sockets.first()?;
        let holds = |old: &&ListenerHandle| old.sockets.iter().any(|socket| Arc::ptr_eq(socket, first));
        self.record.listeners.iter().find(holds).map(|old| &old.spec)
    }

    /// Returns the listening addresses, except those of sockets from the service manager, whose files are not ours.
    pub(super) fn own_addresses(&self) -> Vec<ListenAddress> {
        let own = self.record.listeners.iter().filter(|listener| listener.opened_by != OpenedBy::ServiceManager);
        own.map(|listener| listener.spec.address.clone()).collect()
    }

    /// Returns the listeners of `passed` that this configuration does not use. Call `adopt` first.
    pub(super) fn unused<'p>(&self, passed: &'p [ListenerHandle]) -> impl Iterator<Item = &'p ListenerHandle> {
        passed.iter().filter(|listener| self.spec_of(listener).is_none())
    }

    /// Returns the bundle with the listeners of `passed` that it does not use: a later configuration may use them.
    pub(super) fn with_unused(&self, passed: &[ListenerHandle]) -> Cow<'_, Bundle> {
        let unused: Vec<ListenerHandle> = self.unused(passed).cloned().collect();
        if unused.is_empty() {
            return Cow::Borrowed(self);
        }
        let mut all = self.clone();
        all.record.listeners.extend(unused);
        Cow::Owned(all)
    }

    /// Returns sockets of `previous` that are not in this bundle. Call `adopt` first.
    pub(super) fn sockets_removed_since(&self, previous: &Bundle) -> Vec<Arc<OwnedFd>> {
        let kept = |socket: &&Arc<OwnedFd>| {
            self.record.listeners.iter().flat_map(|listener| &listener.sockets).any(|mine| Arc::ptr_eq(mine, socket))
        };
        let old = previous.record.listeners.iter().flat_map(|listener| &listener.sockets);
        old.filter(|socket| !kept(socket)).cloned().collect()
    }

    /// Encodes the bundle as a memfd and the descriptors that go with it.
    pub(super) fn encode(&self) -> io::Result<(OwnedFd, Vec<Arc<OwnedFd>>)> {
        let mut packer = Packer::default();
        let manifest = Manifest {
            generation: self.generation,
            request: self.request.clone(),
            settings: self.settings.clone(),
            texts: packer.files(&self.record.texts),
            secrets: packer.files(&self.record.secrets),
            globs: self.record.globs.iter().map(|(pattern, paths)| packed_glob(pattern, paths)).collect(),
            names: self.record.names.iter().map(|(name, found)| (name.clone(), found.clone())).collect(),
            accounts: self.record.accounts.clone(),
            listeners: self.record.listeners.iter().map(|listener| packer.listener(listener)).collect(),
            logs: self.record.logs.iter().map(|log| packer.log(log)).collect(),
            locks: self.record.locks.iter().map(|lock| packer.lock(lock)).collect(),
            data_files: self.record.data_files.iter().map(|file| packer.data_file(file)).collect(),
            places: self.record.places.iter().map(|place| packer.place(place)).collect(),
        };
        let json = serde_json::to_vec(&manifest)?;
        let memory = rustix::fs::memfd_create("gale bundle", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let mut file = File::from(memory);
        file.write_all(MAGIC)?;
        file.write_all(&PROTOCOL_VERSION.to_le_bytes())?;
        file.write_all(&(json.len() as u64).to_le_bytes())?;
        file.write_all(&json)?;
        file.write_all(&packer.contents)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
        Ok((file.into(), packer.descriptors))
    }

    /// Decodes the result of `encode`.
    ///
    /// # Errors
    /// The bundle has another version or is damaged.
    pub(super) fn decode(memory: OwnedFd, descriptors: Vec<OwnedFd>) -> io::Result<Bundle> {
        let file = File::from(memory);
        let size = file.metadata()?.len();
        if size > SIZE_MAX {
            return Err(damaged("too large"));
        }
        let mut bytes = vec![0; size as usize];
        file.read_exact_at(&mut bytes, 0)?;
        let (header, rest) = bytes.split_at_checked(HEADER_LENGTH).ok_or_else(|| damaged("no header"))?;
        if &header[..8] != MAGIC {
            return Err(damaged("not a bundle"));
        }
        let version = u32::from_le_bytes(header[8..12].try_into().expect("four bytes"));
        if version != PROTOCOL_VERSION {
            return Err(damaged(&format!("protocol version {version}, expected {PROTOCOL_VERSION}")));
        }
        let length = u64::from_le_bytes(header[12..20].try_into().expect("eight bytes"));
        let split = usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length));
        let (json, contents) = split.ok_or_else(|| damaged("manifest longer than the bundle"))?;
        let manifest: Manifest = serde_json::from_slice(json)?;
        let unpacker = Unpacker { contents, descriptors: descriptors.into_iter().map(Arc::new).collect() };
        unpacker.unpack(manifest)
    }
}

/// `Resources` from a bundle; anything missing in it is an error.
pub struct BundleResources<'b> {
    record: &'b Record,
}

impl Files for BundleResources<'_> {
    fn read(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        replay(self.record.texts.get(path), path)
    }

    fn glob(&mut self, pattern: &Path) -> io::Result<Vec<PathBuf>> {
        replay(self.record.globs.get(pattern), pattern)
    }
}

impl Resources for BundleResources<'_> {
    fn listeners(&mut self, specs: &[ListenSpec]) -> Result<Vec<ListenerHandle>, ResourceError> {
        let find = |spec: &ListenSpec| {
            let known = self.record.listeners.iter().find(|listener| listener.spec == *spec);
            known.cloned().ok_or_else(|| missing(&format!("listening socket {}", spec.address)))
        };
        specs.iter().map(find).collect()
    }

    fn log_file(&mut self, path: &Path) -> Result<LogHandle, ResourceError> {
        let known = self.record.log(path);
        known.cloned().ok_or_else(|| missing(&format!("log \"{}\"", path.display())))
    }

    fn lock_file(&mut self, path: &Path) -> Result<LockHandle, ResourceError> {
        let known = self.record.lock(path);
        known.cloned().ok_or_else(|| missing(&format!("lock file \"{}\"", path.display())))
    }

    fn secret(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        replay(self.record.secrets.get(path), path)
    }

    fn data_file(&mut self, path: &Path) -> io::Result<DataHandle> {
        let missing = || io::Error::other(missing(&format!("data file \"{}\"", path.display())));
        self.record.data_file(path).cloned().ok_or_else(missing)
    }

    fn resolve(&mut self, host: &str) -> io::Result<Vec<IpAddr>> {
        match self.record.names.get(host) {
            Some(Ok(addresses)) => Ok(addresses.clone()),
            Some(Err(text)) => Err(io::Error::other(text.clone())),
            None => Err(io::Error::other(missing(&format!("host \"{host}\"")))),
        }
    }

    fn account(&mut self, user: &str, group: Option<&str>) -> Result<Option<Account>, ResourceError> {
        let known = self.record.accounts.iter().find(|entry| entry.user == user && entry.group.as_deref() == group);
        known.map(|entry| entry.found.clone()).ok_or_else(|| missing(&format!("user \"{user}\"")))
    }

    fn directory(&mut self, _: &Path, _: Option<&Account>) -> Result<(), ResourceError> {
        Ok(()) // created with the bundle
    }
}

fn missing(what: &str) -> ResourceError {
    ResourceError::new(format!("{what} is not in the bundle: the configuration was built differently the first time"))
}

fn replay<T: Clone>(recorded: Option<&Result<T, i32>>, path: &Path) -> io::Result<T> {
    match recorded {
        Some(Ok(value)) => Ok(value.clone()),
        Some(Err(code)) => Err(io::Error::from_raw_os_error(*code)),
        None => Err(io::Error::other(missing(&format!("file \"{}\"", path.display())))),
    }
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    generation: u64,
    request: BuildRequest,
    settings: ProcessSettings,
    texts: Vec<PackedFile>,
    secrets: Vec<PackedFile>,
    globs: Vec<PackedGlob>,
    names: Vec<(String, Result<Vec<IpAddr>, String>)>,
    accounts: Vec<AccountEntry>,
    listeners: Vec<PackedListener>,
    logs: Vec<PackedHandle>,
    locks: Vec<PackedLock>,
    data_files: Vec<PackedData>,
    places: Vec<PackedPlace>,
}

/// A file: the position of its content, or the error number.
#[derive(Serialize, Deserialize)]
struct PackedFile {
    path: PathText,
    content: Result<Content, i32>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct Content {
    start: usize,
    length: usize,
}

#[derive(Serialize, Deserialize)]
struct PathText(#[serde(with = "text::path")] PathBuf);

#[derive(Serialize, Deserialize)]
struct PackedGlob {
    pattern: PathText,
    paths: Result<Vec<PathText>, i32>,
}

#[derive(Serialize, Deserialize)]
struct PackedListener {
    spec: ListenSpec,
    sockets: Vec<usize>,
    opened_by: OpenedBy,
}

#[derive(Serialize, Deserialize)]
struct PackedHandle {
    path: PathText,
    descriptor: usize,
}

/// A lock file: its descriptor, or the error number of reopening it.
#[derive(Serialize, Deserialize)]
struct PackedLock {
    path: PathText,
    descriptor: Result<usize, i32>,
}

/// A copy of a data file: its descriptor and its origin.
#[derive(Serialize, Deserialize)]
struct PackedData {
    path: PathText,
    origin: Origin,
    descriptor: usize,
}

#[derive(Serialize, Deserialize)]
struct PackedPlace {
    is_directory: bool,
    descriptor: usize,
}

fn packed_glob(pattern: &Path, paths: &Result<Vec<PathBuf>, i32>) -> PackedGlob {
    let paths = paths.clone().map(|paths| paths.into_iter().map(PathText).collect());
    PackedGlob { pattern: PathText(pattern.to_owned()), paths }
}

#[derive(Default)]
struct Packer {
    contents: Vec<u8>,
    descriptors: Vec<Arc<OwnedFd>>,
}

impl Packer {
    fn files(&mut self, files: &BTreeMap<PathBuf, Result<Vec<u8>, i32>>) -> Vec<PackedFile> {
        let pack = |(path, content): (&PathBuf, &Result<Vec<u8>, i32>)| PackedFile {
            path: PathText(path.clone()),
            content: content.as_ref().map(|bytes| self.content(bytes)).map_err(|code| *code),
        };
        files.iter().map(pack).collect()
    }

    fn content(&mut self, bytes: &[u8]) -> Content {
        let start = self.contents.len();
        self.contents.extend_from_slice(bytes);
        Content { start, length: bytes.len() }
    }

    fn listener(&mut self, listener: &Listener) -> PackedListener {
        let sockets = listener.sockets.iter().map(|socket| self.descriptor(socket)).collect();
        PackedListener { spec: listener.spec.clone(), sockets, opened_by: listener.opened_by }
    }

    fn log(&mut self, log: &LogFile) -> PackedHandle {
        PackedHandle { path: PathText(log.path().to_owned()), descriptor: self.descriptor(log.descriptor()) }
    }

    /// Packs a lock file. One that cannot be reopened does not prevent a worker process.
    fn lock(&mut self, lock: &LockFile) -> PackedLock {
        let opened = lock.open_anew().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO));
        let descriptor = opened.map(|descriptor| self.descriptor(&Arc::new(descriptor)));
        PackedLock { path: PathText(lock.path().to_owned()), descriptor }
    }

    fn data_file(&mut self, file: &DataFile) -> PackedData {
        let path = PathText(file.path().to_owned());
        PackedData { path, origin: *file.origin(), descriptor: self.descriptor(file.memory()) }
    }

    fn place(&mut self, place: &OpenPlace) -> PackedPlace {
        PackedPlace { is_directory: place.is_directory, descriptor: self.descriptor(&place.descriptor) }
    }

    fn descriptor(&mut self, descriptor: &Arc<OwnedFd>) -> usize {
        self.descriptors.push(Arc::clone(descriptor));
        self.descriptors.len() - 1
    }
}

struct Unpacker<'m> {
    contents: &'m [u8],
    descriptors: Vec<Arc<OwnedFd>>,
}

impl Unpacker<'_> {
    fn unpack(self, manifest: Manifest) -> io::Result<Bundle> {
        let listeners =
            manifest.listeners.into_iter().map(|listener| self.listener(listener)).collect::<Result<_, _>>()?;
        let logs = manifest.logs.into_iter().map(|log| self.log(log)).collect::<Result<_, _>>()?;
        let locks = manifest.locks.into_iter().map(|lock| self.lock(lock)).collect::<Result<_, _>>()?;
        let data_files = manifest.data_files.into_iter().map(|file| self.data_file(file)).collect::<Result<_, _>>()?;
        let places = manifest.places.into_iter().map(|place| self.place(&place)).collect::<Result<_, _>>()?;
        let unglob =
            |glob: PackedGlob| (glob.pattern.0, glob.paths.map(|paths| paths.into_iter().map(|path| path.0).collect()));
        let record = Record {
            texts: self.files(manifest.texts)?,
            secrets: self.files(manifest.secrets)?,
            globs: manifest.globs.into_iter().map(unglob).collect(),
            names: manifest.names.into_iter().collect(),
            accounts: manifest.accounts,
            listeners,
            logs,
            locks,
            data_files,
            places,
        };
        Ok(Bundle { generation: manifest.generation, request: manifest.request, settings: manifest.settings, record })
    }

    fn files(&self, files: Vec<PackedFile>) -> io::Result<BTreeMap<PathBuf, Result<Vec<u8>, i32>>> {
        let unpack = |file: PackedFile| {
            let content = match file.content {
                Ok(content) => Ok(self.content(content)?),
                Err(code) => Err(code),
            };
            Ok((file.path.0, content))
        };
        files.into_iter().map(unpack).collect()
    }

    fn content(&self, content: Content) -> io::Result<Vec<u8>> {
        let end = content.start.checked_add(content.length);
        let bytes = end.and_then(|end| self.contents.get(content.start..end));
        bytes.map(<[u8]>::to_vec).ok_or_else(|| damaged("content outside of the bundle"))
    }

    fn listener(&self, packed: PackedListener) -> io::Result<ListenerHandle> {
        let sockets = packed.sockets.into_iter().map(|index| self.descriptor(index)).collect::<Result<_, _>>()?;
        Ok(Arc::new(Listener { spec: packed.spec, sockets, opened_by: packed.opened_by }))
    }

    fn log(&self, packed: PackedHandle) -> io::Result<LogHandle> {
        Ok(Arc::new(LogFile::shared(packed.path.0, self.descriptor(packed.descriptor)?)))
    }

    fn lock(&self, packed: PackedLock) -> io::Result<LockHandle> {
        let descriptor = match packed.descriptor {
            Ok(index) => Ok(self.descriptor(index)?),
            Err(code) => Err(code),
        };
        Ok(Arc::new(LockFile::received(packed.path.0, descriptor)))
    }

    fn data_file(&self, packed: PackedData) -> io::Result<DataHandle> {
        let memory = self.descriptor(packed.descriptor)?;
        Ok(Arc::new(DataFile::received(packed.path.0, packed.origin, memory)?))
    }

    fn place(&self, packed: &PackedPlace) -> io::Result<OpenPlace> {
        Ok(OpenPlace { descriptor: self.descriptor(packed.descriptor)?, is_directory: packed.is_directory })
    }

    fn descriptor(&self, index: usize) -> io::Result<Arc<OwnedFd>> {
        self.descriptors.get(index).cloned().ok_or_else(|| damaged("descriptor missing"))
    }
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("damaged bundle: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock_file::TryLockError;
    use std::os::unix::ffi::OsStrExt;

    fn bundle() -> Bundle {
        let mut record = Record::default();
        let strange = PathBuf::from(std::ffi::OsStr::from_bytes(b"/etc/\xff.conf"));
        record.texts.insert(strange.clone(), Ok(b"listen 80;\0\xfe".to_vec()));
        record.texts.insert("/etc/none".into(), Err(libc::ENOENT));
        record.globs.insert("/etc/*".into(), Ok(vec![strange]));
        record.secrets.insert("/key".into(), Ok(vec![7; 10_000]));
        record.names.insert("localhost".into(), Ok(vec![IpAddr::from([127, 0, 0, 1])]));
        Bundle { generation: 3, request: BuildRequest::default(), settings: ProcessSettings::default(), record }
    }

    #[test]
    fn a_bundle_survives_the_way_through_memory() {
        let (memory, descriptors) = bundle().encode().expect("encoded");
        assert!(descriptors.is_empty());
        let back = Bundle::decode(memory, Vec::new()).expect("decoded");
        assert_eq!(back.generation, 3);
        assert_eq!(back.record.texts, bundle().record.texts);
        assert_eq!(back.record.globs, bundle().record.globs);
        assert_eq!(back.record.secrets, bundle().record.secrets);
        let error = back.resources().read(Path::new("/etc/none")).expect_err("recorded as missing");
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }

    #[test]
    fn lock_file_that_cannot_be_opened_anew_is_sent_without_a_descriptor() {
        let path = std::env::temp_dir().join(format!("gale-bundle-lock-{}", std::process::id()));
        let mut sent = bundle();
        sent.record.locks.push(Arc::new(LockFile::open(&path).expect("created")));
        // A directory cannot be opened for writing.
        let unopenable = File::open(std::env::temp_dir()).expect("it is there");
        sent.record.locks.push(Arc::new(LockFile::received("/unopenable".into(), Ok(Arc::new(unopenable.into())))));
        let (memory, descriptors) = sent.encode().expect("encoded");
        let descriptors: Vec<_> = descriptors.into_iter().map(|one| Arc::into_inner(one).expect("its own")).collect();
        assert_eq!(descriptors.len(), 1);
        let back = Bundle::decode(memory, descriptors).expect("decoded");
        assert!(back.record.locks[0].try_lock().is_ok());
        let refused = back.record.locks[1].try_lock().expect_err("it has no descriptor");
        assert_eq!(refused, TryLockError::Failed(libc::EISDIR));
        std::fs::remove_file(path).expect("ours");
    }

    #[test]
    fn damaged_bundles_are_refused() {
        let (memory, _) = bundle().encode().expect("encoded");
        let file = File::from(memory);
        let mut good = vec![0; file.metadata().expect("size").len() as usize];
        file.read_exact_at(&mut good, 0).expect("read");
        let mut other_version = good.clone();
        other_version[8] = 99;
        let mut endless = good.clone();
        endless[12..20].fill(0xff);
        let cases =
            [&good[..0], &good[..10], &good[..good.len() - 1], &other_version, &endless, b"GALEBUNDnonsense....."];
        for (index, bytes) in cases.into_iter().enumerate() {
            let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).expect("a memfd");
            File::from(memory.try_clone().expect("descriptors are left")).write_all(bytes).expect("written");
            assert!(Bundle::decode(memory, Vec::new()).is_err(), "case {index}");
        }
    }
}
