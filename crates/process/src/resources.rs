//! Resources that a configuration uses while it is built: everything that nginx's *master* would open or read.
//!
//! There are two implementations: `SystemResources` opens and records them; `BundleResources` answers from such a
//! record, and therefore needs neither root nor the files. Files that nginx's *workers* read do not belong here.

use std::io;
use std::net::IpAddr;
use std::path::Path;

use gale_config::Files;

use super::data_file::DataHandle;
use super::errors::ResourceError;
use super::listen::{ListenSpec, ListenerHandle};
use super::lock_file::LockHandle;
use super::log_file::LogHandle;
use super::user::Account;

/// See the head of the file. Texts of the configuration come through the supertrait.
pub trait Resources: Files {
    /// Opens, adopts or finds all listening sockets of the configuration, in the order given. Called once, last, with
    /// all of them: an address in use is retried together with the others, as nginx does.
    ///
    /// # Errors
    /// nginx's text: `still could not bind()`; the individual failures were logged before.
    fn listeners(&mut self, specs: &[ListenSpec]) -> Result<Vec<ListenerHandle>, ResourceError>;

    /// Opens a log file for appending. The same path gives the same handle.
    ///
    /// # Errors
    /// `open() "/var/log/x.log" failed (13: Permission denied)`
    fn log_file(&mut self, path: &Path) -> Result<LogHandle, ResourceError>;

    /// Opens a lock file, for mutual exclusion among processes. The same path gives the same handle.
    ///
    /// # Errors
    /// `open() "/var/lib/x/lock" failed (13: Permission denied)`
    fn lock_file(&mut self, path: &Path) -> Result<LockHandle, ResourceError>;

    /// Reads a file that only the master may be able to read: keys, certificates.
    ///
    /// # Errors
    /// Errors of `open` and `read`.
    fn secret(&mut self, path: &Path) -> io::Result<Vec<u8>>;

    /// Copies a data file, which may be larger than any text. The same path gives the same handle.
    ///
    /// # Errors
    /// Errors of `open` and `read`; EINVAL if it is no regular file, EFBIG if it is too large.
    fn data_file(&mut self, path: &Path) -> io::Result<DataHandle>;

    /// Returns the addresses of a host name.
    ///
    /// # Errors
    /// The name cannot be resolved.
    fn resolve(&mut self, host: &str) -> io::Result<Vec<IpAddr>>;

    /// Returns the account of a `user` directive; `None` if the process is not root and the directive is to be ignored
    /// with `USER_IGNORED` as the warning.
    ///
    /// # Errors
    /// No such user or group.
    fn account(&mut self, user: &str, group: Option<&str>) -> Result<Option<Account>, ResourceError>;

    /// Creates a directory if necessary and makes the worker's user its owner (`client_body_temp_path`, cache paths).
    ///
    /// # Errors
    /// `mkdir() "/x" failed (13: Permission denied)`
    fn directory(&mut self, path: &Path, owner: Option<&Account>) -> Result<(), ResourceError>;
}
