//! Filters of system calls (seccomp(2)), for a process, or for a thread and the threads that it starts.
//!
//! A filter has one action for the calls of its list and another for all others. A thread may have several; the
//! strictest answer applies. A filter cannot be removed, and new threads and processes inherit it. The crate
//! seccompiler builds the program; it is installed here, because seccompiler cannot ask the kernel to leave speculative
//! execution as it is, which kernels before 5.16 restrict for every thread with a filter.
//!
//! From Linux 5.11 on the kernel remembers the calls that a filter allows with any arguments, and does not run the
//! filter for them.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// The calls of a number that an entry covers: all, or those with a certain argument.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum With {
    /// All calls.
    Anything,
    /// Calls whose argument of this number, from 0, has this value (32 bits).
    Argument(u8, u32),
    /// Calls whose argument of this number, from 0, has this value in the bits of the mask.
    Bits {
        /// Number of the argument.
        argument: u8,
        /// The bits that count.
        mask: u32,
        /// Their value.
        value: u32,
    },
}

/// The kernel's answer to a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Carries it out.
    Allow,
    /// Fails with this error number.
    Fail(i32),
    /// Ends the process, as by SIGSYS.
    End,
    /// Sends SIGSYS to the thread, whose handler decides.
    Signal,
}

/// A filter that is not installed yet.
pub struct Filter(BpfProgram);

impl Filter {
    /// A filter with one answer for the listed calls and another for the rest. A call may be listed several times.
    ///
    /// # Errors
    /// The processor is not supported, or the list is too long.
    pub fn new(
        calls: impl IntoIterator<Item = (libc::c_long, With)>,
        listed: Answer,
        others: Answer,
    ) -> io::Result<Filter> {
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
        // A number without rules matches in all of its calls.
        let mut always: Vec<i64> = Vec::new();
        for (number, with) in calls {
            let of_number = rules.entry(number).or_default();
            match condition(with) {
                None => always.push(number),
                Some(condition) => of_number.push(rule(condition).map_err(io::Error::other)?),
            }
        }
        for number in always {
            rules.insert(number, Vec::new());
        }
        let architecture = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
        let filter = SeccompFilter::new(rules, others.into(), listed.into(), architecture);
        filter.and_then(BpfProgram::try_from).map(Filter).map_err(io::Error::other)
    }

    /// Installs the filter for the calling thread and the threads that it starts. The thread gains no privileges from
    /// then on (`no_new_privs`).
    ///
    /// # Errors
    /// The kernel's.
    pub fn enter(self) -> io::Result<()> {
        self.install(0)
    }

    /// Installs the filter for all threads of the process.
    ///
    /// # Errors
    /// The kernel's; EBUSY if the threads have different filters.
    pub fn enter_in_all_threads(self) -> io::Result<()> {
        self.install(libc::SECCOMP_FILTER_FLAG_TSYNC)
    }

    fn install(mut self, flags: libc::c_ulong) -> io::Result<()> {
        rustix::thread::set_no_new_privs(true)?;
        let program = libc::sock_fprog { len: self.0.len() as u16, filter: self.0.as_mut_ptr().cast() };
        let install = |flags: libc::c_ulong| {
            // SAFETY: the call reads the program, which lives until it returns.
            unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &program) }
        };
        let mut installed = install(flags | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW);
        if installed < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
            // Before Linux 4.17.
            installed = install(flags);
        }
        let error = io::Error::last_os_error();
        // Leaked, because freeing it may be a call that is forbidden now.
        std::mem::forget(self);
        match installed {
            0 => Ok(()),
            1.. => Err(io::Error::from_raw_os_error(libc::EBUSY)),
            _ => Err(error),
        }
    }
}

impl From<Answer> for SeccompAction {
    fn from(answer: Answer) -> SeccompAction {
        match answer {
            Answer::Allow => SeccompAction::Allow,
            Answer::Fail(errno) => SeccompAction::Errno(errno as u32),
            Answer::End => SeccompAction::KillProcess,
            Answer::Signal => SeccompAction::Trap,
        }
    }
}

fn condition(with: With) -> Option<(u8, SeccompCmpOp, u32)> {
    match with {
        With::Anything => None,
        With::Argument(argument, value) => Some((argument, SeccompCmpOp::Eq, value)),
        With::Bits { argument, mask, value } => Some((argument, SeccompCmpOp::MaskedEq(mask.into()), value)),
    }
}

fn rule((argument, compare, value): (u8, SeccompCmpOp, u32)) -> Result<SeccompRule, seccompiler::BackendError> {
    // The kernel ignores the upper half of a register if the argument is an `int`.
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, value.into())?;
    SeccompRule::new(vec![condition])
}

/// True if the kernel supports filters that end a process (Linux 4.14).
pub fn is_available() -> bool {
    let action: u32 = libc::SECCOMP_RET_KILL_PROCESS;
    // SAFETY: the call reads the number of an action.
    let code = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &action) };
    code == 0
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Runs `test` with a filter, on a thread of its own.
    fn under(filter: Filter, test: impl FnOnce() + Send + 'static) {
        let tested = thread::spawn(move || {
            filter.enter().expect("the kernel has filters");
            test();
        });
        tested.join().expect("nothing was forbidden that has to be allowed");
    }

    fn errno_of(code: libc::c_long) -> Option<i32> {
        if code >= 0 { None } else { io::Error::last_os_error().raw_os_error() }
    }

    #[test]
    fn call_of_the_list_fails_and_others_do_not() {
        let refused = [(libc::SYS_getppid, With::Anything), (libc::SYS_sched_yield, With::Anything)];
        let filter = Filter::new(refused, Answer::Fail(libc::EXDEV), Answer::Allow).expect("a filter");
        under(filter, || {
            // SAFETY: these calls take no arguments.
            let (parent, thread) = unsafe { (libc::syscall(libc::SYS_getppid), libc::syscall(libc::SYS_gettid)) };
            assert_eq!(parent, -1);
            assert!(thread > 0);
        });
    }

    #[test]
    fn argument_decides_and_a_number_may_have_several() {
        let domains = [libc::AF_UNIX, libc::AF_INET].map(|domain| (libc::SYS_socket, With::Argument(0, domain as u32)));
        let filter = Filter::new(domains, Answer::Fail(libc::EXDEV), Answer::Allow).expect("a filter");
        under(filter, || {
            let error_of = |domain: i32| {
                // SAFETY: the arguments are numbers; the descriptor is closed at once.
                let code =
                    unsafe { libc::syscall(libc::SYS_socket, domain, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
                let errno = errno_of(code);
                if code >= 0 {
                    // SAFETY: this function owns the descriptor.
                    unsafe { libc::close(code as i32) };
                }
                errno
            };
            assert_eq!(error_of(libc::AF_UNIX), Some(libc::EXDEV));
            assert_eq!(error_of(libc::AF_INET), Some(libc::EXDEV));
            assert_ne!(error_of(libc::AF_INET6), Some(libc::EXDEV));
        });
    }

    #[test]
    fn bits_decide_in_their_mask_alone() {
        let with = With::Bits { argument: 1, mask: 0x3, value: 0x1 };
        let filter = Filter::new([(libc::SYS_fcntl, with)], Answer::Fail(libc::EXDEV), Answer::Allow);
        under(filter.expect("a filter"), || {
            // SAFETY: no descriptor has this number, so every call fails.
            let error_of = |command: i32| errno_of(unsafe { libc::syscall(libc::SYS_fcntl, -1, command, 0) });
            assert_eq!(error_of(libc::F_GETFD), Some(libc::EXDEV), "F_GETFD is 1");
            assert_eq!(error_of(libc::F_SETFD), Some(libc::EBADF), "F_SETFD is 2");
            assert_eq!(error_of(libc::F_GETLK), Some(libc::EXDEV), "F_GETLK is 5");
        });
    }

    #[test]
    fn strictest_of_two_filters_holds() {
        let first = Filter::new([(libc::SYS_getppid, With::Anything)], Answer::Fail(libc::EXDEV), Answer::Allow);
        let second = Filter::new([(libc::SYS_getppid, With::Anything)], Answer::Allow, Answer::Allow);
        assert!(second.is_err(), "a filter with one answer is none");
        let second = Filter::new([(libc::SYS_gettid, With::Anything)], Answer::Fail(libc::ENOSYS), Answer::Allow);
        let (first, second) = (first.expect("a filter"), second.expect("a filter"));
        under(first, move || {
            second.enter().expect("a second one");
            // SAFETY: these calls take no arguments.
            let (parent, thread) = unsafe { (libc::syscall(libc::SYS_getppid), libc::syscall(libc::SYS_gettid)) };
            assert_eq!((parent, thread), (-1, -1));
        });
    }

    #[test]
    fn kernel_knows_filters() {
        assert!(is_available());
    }
}
