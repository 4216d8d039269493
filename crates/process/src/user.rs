//! Accounts: looks up `user` and changes to it.
//!
//! Refuses to change the user in a process with more than one thread: Linux keeps credentials per thread, and the
//! existing threads would stay root. <https://nginx.org/en/docs/ngx_core_module.html#user>

use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use rustix::fs::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};
use serde::{Deserialize, Serialize};

use super::errors::{ResourceError, errno_text};

/// nginx's warning for a `user` directive that has no effect.
pub const USER_IGNORED: &str =
    "the \"user\" directive makes sense only if the master process runs with super-user privileges, ignored";

/// Maximum size in bytes of an entry of the account databases.
const ENTRY_BYTES_MAX: usize = 1 << 20;
/// Maximum number of groups of one account; Linux's own limit (NGROUPS_MAX).
const GROUPS_MAX: usize = 65536;

/// Identity of the worker process: numbers only, so that it needs no account database itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// Name, for messages.
    pub name: String,
    /// User.
    pub user: u32,
    /// Main group.
    pub group: u32,
    /// All groups, as `initgroups` would set them.
    pub groups: Vec<u32>,
}

/// True if the process may change its user: its effective user is root.
pub fn is_super_user() -> bool {
    rustix::process::geteuid().is_root()
}

impl Account {
    /// Looks `user` up; `group` defaults to the group of the same name, as in nginx.
    ///
    /// # Errors
    /// `getpwnam("x") failed` or `getgrnam("x") failed`.
    pub fn look_up(user: &str, group: Option<&str>) -> Result<Account, ResourceError> {
        let not_found = |call: &str, name: &str| ResourceError::new(format!("{call}(\"{name}\") failed"));
        let group = group.unwrap_or(user);
        let name = CString::new(user).map_err(|_| not_found("getpwnam", user))?;
        let group_name = CString::new(group).map_err(|_| not_found("getgrnam", group))?;
        let user_number = user_number(&name).ok_or_else(|| not_found("getpwnam", user))?;
        let group_number = group_number(&group_name).ok_or_else(|| not_found("getgrnam", group))?;
        let groups = groups(&name, group_number);
        Ok(Account { name: user.to_owned(), user: user_number, group: group_number, groups })
    }

    /// Changes to this account irrevocably: group, supplementary groups, user. Only the capabilities in `kept` are
    /// kept. Does nothing in a process that is not root.
    ///
    /// # Errors
    /// nginx's text: `setuid(33) failed (1: Operation not permitted)`.
    pub fn assume(&self, kept: CapabilitySet) -> Result<(), String> {
        if !is_super_user() {
            return Ok(());
        }
        if thread_count() != Some(1) {
            return Err("the user must be changed before the first thread starts".into());
        }
        let failed =
            |call: String| move |error: rustix::io::Errno| format!("{call} failed{}", errno_text(&error.into()));
        let user = Uid::from_raw(self.user);
        let group = Gid::from_raw(self.group);
        let groups: Vec<Gid> = self.groups.iter().map(|&number| Gid::from_raw(number)).collect();
        let keeps = !kept.is_empty() && self.user != 0;

        rustix::thread::set_thread_res_gid(group, group, group).map_err(failed(format!("setgid({})", self.group)))?;
        rustix::thread::set_thread_groups(&groups)
            .map_err(failed(format!("initgroups({}, {})", self.name, self.group)))?;
        if keeps {
            rustix::thread::set_keep_capabilities(true).map_err(failed("prctl(PR_SET_KEEPCAPS, 1)".into()))?;
        }
        rustix::thread::set_thread_res_uid(user, user, user).map_err(failed(format!("setuid({})", self.user)))?;
        if keeps {
            let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
            rustix::thread::set_capabilities(None, sets).map_err(failed("capset()".into()))?;
        }
        Ok(())
    }
}

/// Number of threads of this process; `None` if /proc is not readable.
fn thread_count() -> Option<usize> {
    Some(std::fs::read_dir("/proc/self/task").ok()?.count())
}

fn user_number(name: &CStr) -> Option<u32> {
    with_growing_buffer(|buffer| {
        let mut entry = MaybeUninit::<libc::passwd>::uninit();
        let mut found = ptr::null_mut();
        // SAFETY: every pointer is valid for the call, and `buffer.len()` is the length of the buffer given.
        let code = unsafe {
            libc::getpwnam_r(name.as_ptr(), entry.as_mut_ptr(), buffer.as_mut_ptr().cast(), buffer.len(), &mut found)
        };
        // SAFETY: `found` is not null, so the call succeeded and has filled `entry`; numbers are copied out.
        (code, (!found.is_null()).then(|| unsafe { entry.assume_init_ref().pw_uid }))
    })
}

fn group_number(name: &CStr) -> Option<u32> {
    with_growing_buffer(|buffer| {
        let mut entry = MaybeUninit::<libc::group>::uninit();
        let mut found = ptr::null_mut();
        // SAFETY: every pointer is valid for the call, and `buffer.len()` is the length of the buffer given.
        let code = unsafe {
            libc::getgrnam_r(name.as_ptr(), entry.as_mut_ptr(), buffer.as_mut_ptr().cast(), buffer.len(), &mut found)
        };
        // SAFETY: `found` is not null, so the call succeeded and has filled `entry`; numbers are copied out.
        (code, (!found.is_null()).then(|| unsafe { entry.assume_init_ref().gr_gid }))
    })
}

/// Calls `look_up` with larger and larger buffers while it returns ERANGE.
fn with_growing_buffer(look_up: impl Fn(&mut [u8]) -> (i32, Option<u32>)) -> Option<u32> {
    let mut length = 1024;
    loop {
        let (code, found) = look_up(&mut vec![0; length]);
        if code != libc::ERANGE || length >= ENTRY_BYTES_MAX {
            return found;
        }
        length *= 4;
    }
}

fn groups(name: &CStr, main: u32) -> Vec<u32> {
    let mut groups = vec![0 as libc::gid_t; 64];
    loop {
        let mut count = groups.len() as libc::c_int;
        // SAFETY: `groups` has space for `count` entries; the call writes at most that many, and sets `count` to their
        // number.
        let code = unsafe { libc::getgrouplist(name.as_ptr(), main, groups.as_mut_ptr(), &mut count) };
        if code >= 0 {
            groups.truncate(count as usize);
            return groups;
        }
        if groups.len() >= GROUPS_MAX {
            return vec![main];
        }
        groups.resize(groups.len() * 4, 0);
    }
}

/// Formats an error of a system call as nginx does at the end of a message: `(1: …)`.
pub(super) fn system_text(error: rustix::io::Errno) -> String {
    errno_text(&io::Error::from(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_found_with_its_groups() {
        let account = Account::look_up("root", None).expect("every system has root");
        assert_eq!((account.user, account.group), (0, 0));
        assert!(account.groups.contains(&0));
    }

    #[test]
    fn an_unknown_user_is_named_as_nginx_names_it() {
        let error = Account::look_up("no-such-user-here", None).expect_err("no user has this name");
        assert_eq!(error.to_string(), "getpwnam(\"no-such-user-here\") failed");
        let error = Account::look_up("root", Some("no-such-group")).expect_err("nor this");
        assert_eq!(error.to_string(), "getgrnam(\"no-such-group\") failed");
    }
}
