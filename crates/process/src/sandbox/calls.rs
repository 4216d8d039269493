//! The system calls of worker processes: three lists, and the filters made from them.
//!
//! ```text
//!   allowed   needed for serving                                        executed
//!   fatal     never made by a worker process, useful to an attacker     end the process (SIGSYS)
//!   others    harmless, or unknown to this version of Gale              fail with ENOSYS
//! ```
//!
//! A C library that is newer than Gale tries a new call, gets ENOSYS and falls back to the older one, as on an older
//! kernel. Several filters give these answers: the kernel applies the strictest one. clone3(2), whose arguments a
//! filter cannot see, always fails with ENOSYS; threads are made with clone(2), which is allowed for threads only.

use std::io;

use gale_runtime::seccomp::{Answer, Filter, With};

/// Numbers that the crate libc does not define yet.
const CACHESTAT: libc::c_long = 451;
const FUTEX_WAITV: libc::c_long = 449;

/// Name and number of a system call; the name as `SYS_NAME`.
type Call = (&'static str, libc::c_long);

macro_rules! calls {
    ($($name:ident),* $(,)?) => { &[$((stringify!($name), libc::$name)),*] };
}

/// Allowed with any arguments.
const ALLOWED: &[Call] = calls![
    // Sockets and the event loop.
    SYS_accept,
    SYS_accept4,
    SYS_bind,
    SYS_connect,
    SYS_getpeername,
    SYS_getsockname,
    SYS_getsockopt,
    SYS_listen,
    SYS_recvfrom,
    SYS_recvmmsg,
    SYS_recvmsg,
    SYS_sendmmsg,
    SYS_sendmsg,
    SYS_sendto,
    SYS_setsockopt,
    SYS_shutdown,
    SYS_socketpair,
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    SYS_eventfd2,
    SYS_io_uring_enter,
    SYS_io_uring_register,
    SYS_io_uring_setup,
    SYS_ppoll,
    SYS_pselect6,
    SYS_timerfd_create,
    SYS_timerfd_gettime,
    SYS_timerfd_settime,
    // Descriptors, reading and writing.
    SYS_close,
    SYS_close_range,
    SYS_copy_file_range,
    SYS_dup,
    SYS_dup3,
    SYS_fcntl,
    SYS_lseek,
    SYS_pipe2,
    SYS_pread64,
    SYS_preadv,
    SYS_preadv2,
    SYS_pwrite64,
    SYS_pwritev,
    SYS_pwritev2,
    SYS_read,
    SYS_readv,
    SYS_sendfile,
    SYS_splice,
    SYS_tee,
    SYS_write,
    SYS_writev,
    // Files.
    SYS_faccessat,
    SYS_faccessat2,
    SYS_fadvise64,
    SYS_fallocate,
    SYS_fchmod,
    SYS_fchmodat,
    SYS_fdatasync,
    SYS_flock,
    SYS_fstat,
    SYS_fstatfs,
    SYS_fsync,
    SYS_ftruncate,
    SYS_getcwd,
    SYS_getdents64,
    SYS_inotify_add_watch,
    SYS_inotify_init1,
    SYS_inotify_rm_watch,
    SYS_linkat,
    SYS_memfd_create,
    SYS_mkdirat,
    SYS_newfstatat,
    SYS_openat,
    SYS_openat2,
    SYS_readahead,
    SYS_readlinkat,
    SYS_renameat,
    SYS_renameat2,
    SYS_statfs,
    SYS_statx,
    SYS_sync_file_range,
    SYS_truncate,
    SYS_umask,
    SYS_unlinkat,
    SYS_utimensat,
    // Memory. PCRE generates machine code.
    SYS_brk,
    SYS_get_mempolicy,
    SYS_madvise,
    SYS_membarrier,
    SYS_mincore,
    SYS_mlock,
    SYS_mmap,
    SYS_mprotect,
    SYS_mremap,
    SYS_msync,
    SYS_munlock,
    SYS_munmap,
    // Threads, signals, time.
    SYS_clock_getres,
    SYS_clock_gettime,
    SYS_clock_nanosleep,
    SYS_exit,
    SYS_exit_group,
    SYS_futex,
    SYS_get_robust_list,
    SYS_getcpu,
    SYS_gettimeofday,
    SYS_nanosleep,
    SYS_restart_syscall,
    SYS_rseq,
    SYS_rt_sigaction,
    SYS_rt_sigpending,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_rt_sigsuspend,
    SYS_rt_sigtimedwait,
    SYS_sched_get_priority_max,
    SYS_sched_get_priority_min,
    SYS_sched_getaffinity,
    SYS_sched_getattr,
    SYS_sched_getparam,
    SYS_sched_getscheduler,
    SYS_sched_setaffinity,
    SYS_sched_yield,
    SYS_set_robust_list,
    SYS_set_tid_address,
    SYS_sigaltstack,
    SYS_signalfd4,
    // The process and the machine.
    SYS_getegid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getgroups,
    SYS_getpid,
    SYS_getppid,
    SYS_getpriority,
    SYS_getrandom,
    SYS_getresgid,
    SYS_getresuid,
    SYS_getrlimit,
    SYS_getrusage,
    SYS_gettid,
    SYS_getuid,
    SYS_setpriority,
    SYS_setrlimit,
    SYS_sysinfo,
    SYS_times,
    SYS_uname,
];

/// Older forms, which C libraries use on processors that have them.
#[cfg(target_arch = "x86_64")]
const ALLOWED_OLDER: &[Call] = calls![
    SYS_access,
    SYS_chmod,
    SYS_dup2,
    SYS_epoll_create,
    SYS_epoll_wait,
    SYS_eventfd,
    SYS_getdents,
    SYS_inotify_init,
    SYS_link,
    SYS_lstat,
    SYS_mkdir,
    SYS_open,
    SYS_creat,
    SYS_pause,
    SYS_pipe,
    SYS_poll,
    SYS_readlink,
    SYS_rename,
    SYS_rmdir,
    SYS_select,
    SYS_stat,
    SYS_time,
    SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_OLDER: &[Call] = &[];

/// Calls that no worker process of Gale makes: one that makes them is under an attacker's control.
const FATAL: &[Call] = calls![
    // Other programs, other processes.
    SYS_execve,
    SYS_execveat,
    SYS_kcmp,
    SYS_pidfd_getfd,
    SYS_process_madvise,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_ptrace,
    // Other privileges.
    SYS_capset,
    SYS_setfsgid,
    SYS_setfsuid,
    SYS_setgid,
    SYS_setgroups,
    SYS_setns,
    SYS_setregid,
    SYS_setresgid,
    SYS_setresuid,
    SYS_setreuid,
    SYS_setuid,
    SYS_unshare,
    // Other files.
    SYS_chroot,
    SYS_fsconfig,
    SYS_fsmount,
    SYS_fsopen,
    SYS_fspick,
    SYS_mount,
    SYS_mount_setattr,
    SYS_move_mount,
    SYS_open_by_handle_at,
    SYS_open_tree,
    SYS_pivot_root,
    SYS_quotactl,
    SYS_swapoff,
    SYS_swapon,
    SYS_umount2,
    // The kernel and the machine.
    SYS_acct,
    SYS_add_key,
    SYS_adjtimex,
    SYS_bpf,
    SYS_clock_adjtime,
    SYS_clock_settime,
    SYS_delete_module,
    SYS_fanotify_init,
    SYS_finit_module,
    SYS_init_module,
    SYS_kexec_file_load,
    SYS_kexec_load,
    SYS_keyctl,
    SYS_perf_event_open,
    SYS_personality,
    SYS_reboot,
    SYS_request_key,
    SYS_sethostname,
    SYS_setdomainname,
    SYS_settimeofday,
    SYS_syslog,
    SYS_userfaultfd,
    SYS_vhangup,
];

#[cfg(target_arch = "x86_64")]
const FATAL_OLDER: &[Call] = calls![SYS_fork, SYS_ioperm, SYS_iopl, SYS_modify_ldt, SYS_uselib, SYS_vfork];
#[cfg(not(target_arch = "x86_64"))]
const FATAL_OLDER: &[Call] = &[];

/// Families of sockets that workers use; the C library uses the last one to get the machine's addresses.
const FAMILIES: [i32; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Options of prctl(2) that workers use: names of threads and of memory, huge pages, core files, filters.
const PRCTL: [i32; 13] = [
    libc::PR_GET_DUMPABLE,
    libc::PR_SET_DUMPABLE,
    libc::PR_GET_NAME,
    libc::PR_SET_NAME,
    libc::PR_GET_NO_NEW_PRIVS,
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_GET_SECCOMP,
    libc::PR_SET_SECCOMP,
    libc::PR_GET_THP_DISABLE,
    libc::PR_SET_THP_DISABLE,
    libc::PR_GET_TIMERSLACK,
    libc::PR_SET_TIMERSLACK,
    libc::PR_SET_VMA,
];

/// Requests of ioctl(2) that workers make.
const IOCTL: [u32; 9] = [
    libc::FIOCLEX as u32,
    libc::FIONBIO as u32,
    libc::FIONCLEX as u32,
    libc::FIONREAD as u32,
    libc::TCGETS as u32,
    libc::TIOCGWINSZ as u32,
    libc::TIOCOUTQ as u32,
    // Indexes and names of interfaces.
    libc::SIOCGIFINDEX as u32,
    libc::SIOCGIFNAME as u32,
];

const THREAD: u32 = libc::CLONE_THREAD as u32;

/// Treatment of calls that are not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strictness {
    /// Fatal calls end the process, others fail.
    Enforced,
    /// A signal handler is called first for each of them.
    Diagnosed,
}

/// Restricts the calling thread and those that it starts.
///
/// # Errors
/// Error of the kernel.
pub(super) fn restrict(strictness: Strictness) -> io::Result<()> {
    let (of_fatal, of_others) = match strictness {
        Strictness::Enforced => (Answer::End, Answer::Fail(libc::ENOSYS)),
        Strictness::Diagnosed => (Answer::Signal, Answer::Signal),
    };
    let process = rustix::process::getpid().as_raw_nonzero().get() as u32;
    // The C library tries it for each thread with all signals blocked, so the handler could not run.
    let clone3 = [(libc::SYS_clone3, With::Anything)];
    let others = Filter::new(allowed(process).chain(clone3), Answer::Allow, of_others)?;
    let fatal = Filter::new(fatal(), of_fatal, Answer::Allow)?;
    let opaque = Filter::new(clone3, Answer::Fail(libc::ENOSYS), Answer::Allow)?;
    opaque.enter()?;
    fatal.enter()?;
    others.enter()
}

/// Forbids all threads of this process to create io_uring rings from now on.
///
/// # Errors
/// Error of the kernel.
pub(super) fn forbid_rings() -> io::Result<()> {
    let setup = [(libc::SYS_io_uring_setup, With::Anything)];
    Filter::new(setup, Answer::Fail(libc::EPERM), Answer::Allow)?.enter_in_all_threads()
}

/// Returns the name of a call that ends the process.
pub(super) fn name_of_fatal(number: libc::c_long) -> Option<&'static str> {
    let is_it = |call: &&Call| call.1 == number;
    let name = FATAL.iter().chain(FATAL_OLDER).find(is_it).map(|(name, _)| *name);
    // Fatal when it creates a process instead of a thread.
    let name = name.or((number == libc::SYS_clone).then_some("SYS_clone"));
    name.map(|name| name.strip_prefix("SYS_").unwrap_or(name))
}

fn numbers(calls: &'static [Call]) -> impl Iterator<Item = (libc::c_long, With)> {
    calls.iter().map(|&(_, number)| (number, With::Anything))
}

fn allowed(process: u32) -> impl Iterator<Item = (libc::c_long, With)> {
    let first = |number: libc::c_long| move |value: u32| (number, With::Argument(0, value));
    let conditional = [
        (libc::SYS_clone, With::Bits { argument: 0, mask: THREAD, value: THREAD }),
        (libc::SYS_seccomp, With::Argument(0, libc::SECCOMP_SET_MODE_FILTER)),
        (libc::SYS_seccomp, With::Argument(0, libc::SECCOMP_GET_ACTION_AVAIL)),
        (CACHESTAT, With::Anything),
        (FUTEX_WAITV, With::Anything),
    ];
    // The process may signal itself (abort(3)), but no other.
    let signals = [libc::SYS_kill, libc::SYS_tgkill].map(|number| (number, With::Argument(0, process)));
    let limits = [0, process].map(first(libc::SYS_prlimit64));
    let families = FAMILIES.map(|family| family as u32).map(first(libc::SYS_socket));
    let prctl = PRCTL.map(|option| option as u32).map(first(libc::SYS_prctl));
    let ioctl = IOCTL.map(|request| (libc::SYS_ioctl, With::Argument(1, request)));
    numbers(ALLOWED)
        .chain(numbers(ALLOWED_OLDER))
        .chain(conditional)
        .chain(signals)
        .chain(limits)
        .chain(families)
        .chain(prctl)
        .chain(ioctl)
}

fn fatal() -> impl Iterator<Item = (libc::c_long, With)> {
    let process = (libc::SYS_clone, With::Bits { argument: 0, mask: THREAD, value: 0 });
    numbers(FATAL).chain(numbers(FATAL_OLDER)).chain([process])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_call_stands_in_two_lists() {
        let mut seen = BTreeSet::new();
        for (name, number) in [ALLOWED, ALLOWED_OLDER, FATAL, FATAL_OLDER].into_iter().flatten() {
            assert!(seen.insert(number), "{name}");
        }
        assert!(!seen.contains(&libc::SYS_clone3), "its arguments cannot be seen");
    }

    #[test]
    fn fatal_calls_have_names() {
        assert_eq!(name_of_fatal(libc::SYS_execve), Some("execve"));
        assert_eq!(name_of_fatal(libc::SYS_clone), Some("clone"));
        assert_eq!(name_of_fatal(libc::SYS_read), None);
    }

    #[test]
    fn worker_under_the_filters_makes_threads_and_no_unknown_call() {
        let tested = std::thread::spawn(|| {
            restrict(Strictness::Enforced).expect("the kernel has filters");
            let value = std::thread::spawn(|| 7).join().expect("a thread");
            // SAFETY: no call has this number.
            let code = unsafe { libc::syscall(100_000) };
            (value, code, io::Error::last_os_error().raw_os_error())
        });
        assert_eq!(tested.join().expect("it ends"), (7, -1, Some(libc::ENOSYS)));
    }
}
