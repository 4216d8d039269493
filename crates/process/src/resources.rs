//! What a configuration may ask for while it is built: everything nginx's *master* would open or read.
//!
//! Two implementations: `SystemResources` does it and records it; `BundleResources` answers from such a record, and
//! therefore needs neither root nor the files. Files that nginx's *workers* read are not asked for here.

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
    /// all of them: an address that is in use is retried together with the others, as nginx does.
    ///
    /// # Errors
    /// nginx's words: `still could not bind()`; what failed has been logged before.
    fn listeners(&mut self, specs: &[ListenSpec]) -> Result<Vec<ListenerHandle>, ResourceError>;

    /// Opens a log file for appending. The same path gives the same handle.
    ///
    /// # Errors
    /// `open() "/var/log/x.log" failed (13: Permission denied)`
    fn log_file(&mut self, path: &Path) -> Result<LogHandle, ResourceError>;

    /// Opens a lock file, for what only one of several processes may do at a time. The same path gives the same handle.
    ///
    /// # Errors
    /// `open() "/var/lib/x/lock" failed (13: Permission denied)`
    fn lock_file(&mut self, path: &Path) -> Result<LockHandle, ResourceError>;

    /// Reads a file that only the master may be able to read: keys, certificates.
    ///
    /// # Errors
    /// As `open` and `read` report them.
    fn secret(&mut self, path: &Path) -> io::Result<Vec<u8>>;

    /// Copies a file of data, which may be larger than any text. The same path gives the same handle.
    ///
    /// # Errors
    /// As `open` and `read` report them; EINVAL if it is no regular file, EFBIG if it is too large.
    fn data_file(&mut self, path: &Path) -> io::Result<DataHandle>;

    /// Addresses of a host name.
    ///
    /// # Errors
    /// The name cannot be resolved.
    fn resolve(&mut self, host: &str) -> io::Result<Vec<IpAddr>>;

    /// The account of a `user` directive; none when the process is not root and the directive is to be ignored with
    /// `USER_IGNORED` as the warning.
    ///
    /// # Errors
    /// No such user or group.
    fn account(&mut self, user: &str, group: Option<&str>) -> Result<Option<Account>, ResourceError>;

    /// Makes sure that a directory exists and belongs to the worker's user (`client_body_temp_path`, cache paths).
    ///
    /// # Errors
    /// `mkdir() "/x" failed (13: Permission denied)`
    fn directory(&mut self, path: &Path, owner: Option<&Account>) -> Result<(), ResourceError>;
}
