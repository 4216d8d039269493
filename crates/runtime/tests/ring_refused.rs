//! io_uring refused by seccomp: entirely, as in containers, so that epoll is used and the loop reports the reason; or
//! only calls with many entries, like a kernel without memory, so that these operations fail and the rest goes on.

mod common;

const DRIVER: DriverChoice = DriverChoice::IoUring;

use std::io::{ErrorKind, Read, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use gale_runtime::*;

fn statement(code: u32, jump_true: u8, jump_false: u8, value: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: jump_true, jf: jump_false, k: value }
}

/// Makes a system call of this thread, and of those that it starts, fail with `errno` from now on.
fn refuse(call: libc::c_long, errno: i32) {
    // The number of the call is the first word of the filter's input.
    install(&mut [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]);
}

/// Number of entries in one call from which on the kernel pretends to have no memory.
const TOO_MANY: usize = 10;

/// In virtual time, which passes only while no task can run.
const DEADLINE: Duration = Duration::from_secs(60);

fn refuse_many() {
    // The second argument is the number of entries; arguments are 8 bytes each and begin at 16.
    install(&mut [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 3, libc::SYS_io_uring_enter as u32),
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 24),
        statement(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 1, TOO_MANY as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EAGAIN as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]);
}

fn install(filter: &mut [libc::sock_filter]) {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: plain numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program is a valid `sock_fprog`, and outlives the call, which copies it.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) }, 0);
}

/// Runs a loop that wants io_uring on a thread where `call` is refused; returns its driver and its reason, and checks
/// that it works.
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
        return skip("no io_uring here");
    }
    assert_eq!(loop_without(libc::SYS_io_uring_enter, libc::EPERM), ("epoll", Some(libc::EPERM)));
    assert_eq!(loop_without(libc::SYS_io_uring_register, libc::EPERM), ("epoll", Some(libc::EPERM)));
}

/// Runs `main` on a thread whose kernel refuses many entries at once after `main` has called `refuse_many`.
fn run_without_memory(main: impl AsyncFnOnce() + Send + 'static) {
    let work = || {
        let mut event_loop = event_loop(simulated_time());
        if event_loop.driver_name() != "io_uring" {
            return skip("no io_uring here");
        }
        event_loop.run(async { timeout(DEADLINE, main()).await.expect("somebody was forgotten") });
    };
    std::thread::spawn(work).join().unwrap();
}

async fn exchange(server: &Stream, client: &Stream) {
    for _ in 0..2 {
        let mut receiving = Box::pin(receive(server, 8));
        let _ = poll_once(&mut receiving).await;
        send(client, b"question").await;
        assert_eq!(receiving.await, b"question");
    }
}

/// Checks that the loop goes on: connections are served, timers expire, and calls from other threads arrive.
async fn assert_alive() {
    let (server, client) = tcp_pair().await;
    exchange(&server, &client).await;
    sleep(Duration::from_millis(5)).await;
    let (called, heard) = std::sync::mpsc::channel();
    let remote = remote();
    let caller = std::thread::spawn(move || remote.run(Box::new(move || called.send(()).unwrap())).unwrap());
    while heard.try_recv().is_err() {
        yield_now().await;
    }
    caller.join().unwrap();
}

#[test]
fn waiting_that_the_kernel_has_no_memory_for_fails_and_the_loop_goes_on() {
    let told = Arc::new(Mutex::new(Vec::new()));
    set_shortage_reporter({
        let told = Arc::clone(&told);
        move |shortage| told.lock().unwrap().push(*shortage)
    });
    run_without_memory(async || {
        let pairs: Vec<_> = (0..TOO_MANY).map(|_| unix_pair()).collect();
        let listener = Listener::bind(&any_port(), 16, AcceptOptions::default()).unwrap();
        turns(2).await;
        refuse_many();
        // Receives, and a poll for connections.
        let mut inputs: Vec<Buffer> = pairs.iter().map(|_| Buffer::new()).collect();
        let mut receives: Vec<_> =
            pairs.iter().zip(&mut inputs).map(|((server, _), input)| Box::pin(server.recv(input, 100))).collect();
        for receive in &mut receives {
            assert!(poll_once(receive).await.is_pending());
        }
        let mut accepted = Box::pin(listener.accept());
        assert!(poll_once(&mut accepted).await.is_pending());
        for receive in receives {
            assert_eq!(receive.await.unwrap_err().kind(), ErrorKind::OutOfMemory);
        }
        assert_eq!(accepted.await.unwrap_err().kind(), ErrorKind::OutOfMemory);
        assert_eq!(ring_counters().refused, TOO_MANY as u64 + 1);
        // Polls for room, and for the peers' hang-ups.
        for (server, _) in &pairs {
            while rustix::io::write(server, &[7; 1000]).is_ok() {}
        }
        let mut outputs: Vec<Output> = pairs.iter().map(|_| Output::new()).collect();
        let mut sends: Vec<_> = pairs
            .iter()
            .zip(&mut outputs)
            .map(|((server, _), output)| {
                output.push(b"no room");
                Box::pin(async { (server.send_all(output).await, output.len_bytes()) })
            })
            .collect();
        for send in &mut sends {
            assert!(poll_once(send).await.is_pending());
        }
        for send in sends {
            let (sent, left) = send.await;
            assert_eq!((sent.unwrap_err().kind(), left > 0), (ErrorKind::OutOfMemory, true));
        }
        let mut leavings: Vec<_> = pairs.iter().map(|(server, _)| Box::pin(server.peer_closed())).collect();
        for leaving in &mut leavings {
            assert!(poll_once(leaving).await.is_pending());
        }
        for leaving in leavings {
            leaving.await;
        }
        assert_eq!(ring_counters().refused, 3 * TOO_MANY as u64 + 1);
        // Few entries at a time still work, also for accepting.
        let client = Stream::connect(&listener.local_address().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        exchange(&server, &client).await;
        assert_alive().await;
    });
    let told = told.lock().unwrap();
    if !told.is_empty() {
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].to_string().ends_with("operations failed"), "{}", told[0]);
    }
}

#[test]
fn answers_and_closes_that_the_kernel_has_no_memory_for_are_done_directly() {
    run_without_memory(async || {
        let mut pairs = Vec::new();
        for _ in 0..TOO_MANY {
            let (near, mut client) = std::os::unix::net::UnixStream::pair().unwrap();
            let server = Stream::from_fd(near.into()).unwrap();
            for _ in 0..2 {
                let mut receiving = Box::pin(receive(&server, 8));
                assert!(poll_once(&mut receiving).await.is_pending());
                client.write_all(b"question").unwrap();
                assert_eq!(receiving.await, b"question");
            }
            pairs.push((server, client));
        }
        turns(2).await;
        refuse_many();
        let taken: Vec<usize> =
            pairs.iter().map(|(server, _)| server.try_send_copy(b"answer", false).unwrap()).collect();
        turns(1).await;
        let refused = ring_counters().refused;
        assert!(refused >= TOO_MANY as u64 || taken[0] == 0);
        for ((_, client), length) in pairs.iter_mut().zip(taken) {
            client.read_exact(&mut vec![0; length]).unwrap();
        }
        let (servers, clients): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        drop(servers);
        turns(1).await;
        assert!(ring_counters().refused >= refused + TOO_MANY as u64);
        // There are as many cancellations, so the kernel releases these connections when the loop ends.
        drop(clients);
    });
}
