//! io_uring refused by seccomp, as in containers: epoll serves in its place, and the loop says why.

mod common;

const DRIVER: DriverChoice = DriverChoice::IoUring;

use common::*;
use gale_runtime::*;

/// Has a system call of this thread, and of those that it starts, fail with `errno` from now on.
fn refuse(call: libc::c_long, errno: i32) {
    let statement = |code: u32, jump_true: u8, jump_false: u8, value: u32| libc::sock_filter {
        code: code as u16,
        jt: jump_true,
        jf: jump_false,
        k: value,
    };
    // The number of the call is the first word of what the filter sees.
    let filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: plain numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program is a valid `sock_fprog`, and outlives the call, which copies it.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) }, 0);
}

/// A loop that asks for io_uring on a thread where `call` is refused: its driver, its reason, and that it works.
fn loop_without(call: libc::c_long, errno: i32) -> (&'static str, Option<i32>) {
    let work = move || {
        refuse(call, errno);
        let mut event_loop = event_loop(simulated_time());
        event_loop.run(async {
            let (server, client) = tcp_pair().await;
            for _ in 0..3 {
                let mut receiving = Box::pin(receive(&server, 8));
                assert!(poll_once(&mut receiving).await.is_pending());
                send(&client, b"question").await;
                assert_eq!(receiving.await, b"question");
                send(&server, b"answer").await;
                assert_eq!(receive(&client, 6).await, b"answer");
            }
            drop(client);
            server.peer_closed().await;
        });
        (event_loop.driver_name(), event_loop.driver_reason().and_then(|reason| reason.raw_os_error()))
    };
    std::thread::spawn(work).join().unwrap()
}

#[test]
fn a_set_up_that_is_refused_is_replaced_by_epoll_which_says_why() {
    for errno in [libc::EPERM, libc::ENOSYS, libc::EINVAL, libc::ENOMEM] {
        assert_eq!(loop_without(libc::SYS_io_uring_setup, errno), ("epoll", Some(errno)));
    }
}

#[test]
fn a_ring_that_cannot_be_used_is_replaced_by_epoll_too() {
    if event_loop(simulated_time()).driver_name() != "io_uring" {
        return eprintln!("skipped: no io_uring here");
    }
    assert_eq!(loop_without(libc::SYS_io_uring_enter, libc::EPERM), ("epoll", Some(libc::EPERM)));
    assert_eq!(loop_without(libc::SYS_io_uring_register, libc::EPERM), ("epoll", Some(libc::EPERM)));
}
