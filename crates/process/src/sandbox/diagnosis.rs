//! `sandbox auto diagnose`: names the system calls that are not allowed.
//!
//! The filters send SIGSYS instead of giving their answers. The handler writes a line to standard error, which is the
//! first error log, and then gives the filter's answer: it ends the process, or lets the call fail with ENOSYS. It
//! allocates nothing and takes no lock.

use std::io;
use std::mem::MaybeUninit;

use super::calls;

/// Installs the handler. Call this before the filters are installed.
///
/// # Errors
/// Error of sigaction(2).
pub(super) fn install() -> io::Result<()> {
    // SAFETY: all zeros are a valid `sigaction`: no flags and an empty mask.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handle as *const () as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: the handler has the signature that SA_SIGINFO requires, and may be called at any moment (see below).
    let code = unsafe { libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()) };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The part of `siginfo_t` that SIGSYS fills in, behind three numbers (sigaction(2)).
#[repr(C)]
struct SystemCallInfo {
    signal: libc::c_int,
    error: libc::c_int,
    code: libc::c_int,
    address: *mut libc::c_void,
    number: libc::c_int,
    architecture: libc::c_uint,
}

extern "C" fn handle(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes the information of SIGSYS, which has this layout.
    let number = unsafe { (*info.cast::<SystemCallInfo>()).number };
    let name = calls::name_of_fatal(number.into());
    let mut line = Line::new();
    line.push(b"gale: [alert] \"sandbox\": system call ");
    line.push_number(number.unsigned_abs());
    match name {
        Some(name) => {
            line.push(b" (");
            line.push(name.as_bytes());
            line.push(b") is forbidden, the worker process ends\n");
        }
        None => line.push(b" is not allowed, it fails with ENOSYS\n"),
    }
    line.write();
    if name.is_some() {
        end();
    }
    // SAFETY: the kernel passes the thread's registers, which it restores from there after the handler.
    unsafe { fail_with_enosys(context) };
}

/// Ends the process as the filter would have.
fn end() -> ! {
    // SAFETY: the calls change the action of a signal, send it to this thread, and end the process if it is blocked.
    unsafe {
        libc::signal(libc::SIGSYS, libc::SIG_DFL);
        let mut signals = MaybeUninit::uninit();
        libc::sigemptyset(signals.as_mut_ptr());
        libc::sigaddset(signals.as_mut_ptr(), libc::SIGSYS);
        libc::raise(libc::SIGSYS);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, signals.as_ptr(), std::ptr::null_mut());
        libc::_exit(2)
    }
}

/// # Safety
///
/// `context` is the `ucontext_t` of the handler.
unsafe fn fail_with_enosys(context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: guaranteed by the caller.
    let registers = unsafe { &mut (*context).uc_mcontext };
    #[cfg(target_arch = "x86_64")]
    {
        registers.gregs[libc::REG_RAX as usize] = -i64::from(libc::ENOSYS);
    }
    #[cfg(target_arch = "aarch64")]
    {
        registers.regs[0] = -i64::from(libc::ENOSYS) as u64;
    }
}

/// A line of bounded length, on the stack.
struct Line {
    bytes: [u8; 160],
    length: usize,
}

impl Line {
    fn new() -> Line {
        Line { bytes: [0; 160], length: 0 }
    }

    fn push(&mut self, text: &[u8]) {
        for &byte in text {
            if let Some(place) = self.bytes.get_mut(self.length) {
                *place = byte;
                self.length += 1;
            }
        }
    }

    fn push_number(&mut self, number: u32) {
        let mut digits = [0; 10];
        let (mut rest, mut first) = (number, digits.len());
        loop {
            first -= 1;
            digits[first] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.push(&digits[first..]);
    }

    fn write(&self) {
        // SAFETY: the bytes are this value's own. A failure cannot be reported anywhere.
        unsafe { libc::write(libc::STDERR_FILENO, self.bytes.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_holds_text_and_numbers_up_to_its_length() {
        let mut line = Line::new();
        line.push(b"call ");
        line.push_number(0);
        line.push(b" ");
        line.push_number(4_294_967_295);
        assert_eq!(&line.bytes[..line.length], b"call 0 4294967295");
        line.push(&[b'x'; 500]);
        assert_eq!(line.length, 160);
    }
}
