//! Connecting with options on the real kernel, the errors of failed steps, and readiness without receiving.

pub(crate) mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::future::poll_fn;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use common::*;
use gale_runtime::*;
use rustix::net::sockopt;

fn int_option(socket: &impl AsRawFd, level: i32, option: i32) -> i32 {
    let (mut value, mut length) = (0i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the descriptor is open, the pointers are to live values, and `length` is the size of `value`.
    let code = unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut length) };
    assert_eq!(code, 0);
    value
}

fn listener() -> (Listener, SocketAddress) {
    let listener = Listener::bind(&any_port(), 16, AcceptOptions::default()).unwrap();
    let address = listener.local_address().unwrap();
    (listener, address)
}

async fn is_readable_now(stream: &Stream) -> bool {
    poll_fn(|cx| std::task::Poll::Ready(stream.poll_readable(cx).is_ready())).await
}

async fn is_writable_now(stream: &Stream) -> bool {
    poll_fn(|cx| std::task::Poll::Ready(stream.poll_writable(cx).is_ready())).await
}

#[test]
fn connect_options_are_set_on_the_socket() {
    run(async {
        let (listener, address) = listener();
        let local: SocketAddress = "127.0.0.2:0".parse::<std::net::SocketAddr>().unwrap().into();
        let options = ConnectOptions {
            local: Some(local),
            keepalive: true,
            receive_buffer: Some(64 * 1024),
            send_buffer: Some(32 * 1024),
            timeout: Some(Duration::from_secs(60)),
            ..ConnectOptions::default()
        };
        let stream = options.connect(&address).await.unwrap();
        let (_accepted, peer) = listener.accept().await.unwrap();
        assert_eq!(peer.inet().unwrap().ip().to_string(), "127.0.0.2");
        let socket = stream.as_fd();
        assert!(sockopt::socket_keepalive(socket).unwrap());
        // The kernel doubles the sizes for its own needs.
        assert_eq!(sockopt::socket_recv_buffer_size(socket).unwrap(), 128 * 1024);
        assert_eq!(sockopt::socket_send_buffer_size(socket).unwrap(), 64 * 1024);
        assert_eq!(int_option(&socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT), 1);
        let plain = Stream::connect(&address).await.unwrap();
        assert!(!sockopt::socket_keepalive(plain.as_fd()).unwrap());
    });
}

#[test]
fn connect_fast_open_carries_data_and_answer() {
    run(async {
        let (listener, address) = listener();
        let options = ConnectOptions { fast_open: true, ..ConnectOptions::default() };
        for _ in 0..3 {
            let client = options.connect(&address).await.unwrap();
            assert_eq!(int_option(&client.as_fd(), libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT), 1);
            send(&client, b"hello").await;
            let (server, _) = listener.accept().await.unwrap();
            assert_eq!(receive(&server, 5).await, b"hello");
            send(&server, b"answer").await;
            assert_eq!(receive(&client, 6).await, b"answer");
        }
    });
}

#[test]
fn connect_over_unix_sockets_ignores_options_of_tcp() {
    run(async {
        let directory = Directory::new();
        let address = SocketAddress::unix(directory.path("listen.sock"));
        let listener = Listener::bind(&address, 16, AcceptOptions::default()).unwrap();
        let options = ConnectOptions {
            transparent: true,
            keepalive: true,
            fast_open: true,
            send_buffer: Some(32 * 1024),
            ..ConnectOptions::default()
        };
        let client = options.connect(&address).await.unwrap();
        send(&client, b"hello").await;
        let (server, _) = listener.accept().await.unwrap();
        assert_eq!(receive(&server, 5).await, b"hello");
    });
}

#[test]
fn a_connection_over_a_unix_socket_is_made_at_once() {
    run(async {
        let directory = Directory::new();
        let address = SocketAddress::unix(directory.path("listen.sock"));
        let listener = Listener::bind(&address, 16, AcceptOptions::default()).unwrap();
        let Ok(client) = ConnectOptions::default().begin(&address).unwrap().made() else {
            panic!("nothing is to be waited for")
        };
        send(&client, b"hello").await;
        let (server, _) = listener.accept().await.unwrap();
        assert_eq!(receive(&server, 5).await, b"hello");
        send(&server, b"answer").await;
        assert_eq!(receive(&client, 6).await, b"answer");
    });
}

#[test]
fn a_connection_within_the_machine_is_made_or_refused_at_once() {
    run(async {
        let (listener, address) = listener();
        // A busy kernel may defer it.
        let made = (0..100).find_map(|_| ConnectOptions::default().begin(&address).unwrap().made().ok());
        let client = made.expect("nothing is to be waited for");
        send(&client, b"hello").await;
        let server = loop {
            let (server, peer) = listener.accept().await.unwrap();
            if peer == client.local_address().unwrap() {
                break server;
            }
        };
        assert_eq!(receive(&server, 5).await, b"hello");
        send(&server, b"answer").await;
        assert_eq!(receive(&client, 6).await, b"answer");

        drop(listener);
        turns(3).await;
        let refused = (0..100).find_map(|_| ConnectOptions::default().begin(&address).err());
        let refused = refused.expect("nothing is to be waited for");
        assert_eq!((refused.step, refused.error.kind()), (ConnectStep::Connect, ErrorKind::ConnectionRefused));
    });
}

#[test]
fn connect_that_fails_says_which_step_did() {
    run(async {
        let (listener, address) = listener();
        // An address reserved for documentation, which no machine has.
        let foreign: SocketAddress = "192.0.2.1:0".parse::<std::net::SocketAddr>().unwrap().into();
        let options = ConnectOptions { local: Some(foreign), ..ConnectOptions::default() };
        let failed = options.connect(&address).await.unwrap_err();
        assert_eq!((failed.step, failed.error.kind()), (ConnectStep::Bind, ErrorKind::AddrNotAvailable));
        assert!(failed.to_string().starts_with("bind() failed: "), "{failed}");

        drop(listener);
        turns(3).await;
        let failed = ConnectOptions::default().connect(&address).await.unwrap_err();
        assert_eq!((failed.step, failed.error.kind()), (ConnectStep::Connect, ErrorKind::ConnectionRefused));
    });
}

#[test]
fn connect_transparent_needs_the_right_to_it() {
    run(async {
        let (_listener, address) = listener();
        let probe = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let on = 1i32;
        // SAFETY: the descriptor is open, and the pointer is to a live value of this length.
        let may = unsafe {
            let length = size_of::<i32>() as libc::socklen_t;
            libc::setsockopt(probe.as_raw_fd(), libc::IPPROTO_IP, libc::IP_TRANSPARENT, (&raw const on).cast(), length)
        } == 0;
        let options = ConnectOptions { transparent: true, ..ConnectOptions::default() };
        match options.connect(&address).await {
            Ok(stream) => {
                assert!(may);
                assert_eq!(int_option(&stream.as_fd(), libc::IPPROTO_IP, libc::IP_TRANSPARENT), 1);
            }
            Err(failed) => {
                assert!(!may, "{failed}");
                assert_eq!((failed.step, failed.error.kind()), (ConnectStep::Transparent, ErrorKind::PermissionDenied));
            }
        }
    });
}

#[test]
fn connect_to_a_full_listener_times_out() {
    run(async {
        let listener = Listener::bind(&any_port(), 1, AcceptOptions::default()).unwrap();
        let address = listener.local_address().unwrap();
        let options = ConnectOptions { timeout: Some(Duration::from_millis(500)), ..ConnectOptions::default() };
        let mut streams = Vec::new();
        // The queue has room for a few; then the kernel does not answer any more.
        let failed = loop {
            match options.connect(&address).await {
                Ok(stream) => streams.push(stream),
                Err(failed) => break failed,
            }
            assert!(streams.len() < 100);
        };
        assert_eq!((failed.step, failed.error.kind()), (ConnectStep::Connect, ErrorKind::TimedOut));
    });
}

#[test]
fn readable_is_told_of_bytes_and_end_and_takes_neither() {
    run(async {
        for (server, client) in [tcp_pair().await, unix_pair()] {
            assert!(!is_readable_now(&server).await);
            for text in [&b"one"[..], b"two", b"three"] {
                let waiting = poll_fn(|cx| server.poll_readable(cx));
                let (waited, ()) = both(waiting, send(&client, text)).await;
                waited.unwrap();
                for _ in 0..3 {
                    assert!(is_readable_now(&server).await, "as long as there are bytes");
                    turns(1).await;
                }
                assert_eq!(receive(&server, text.len()).await, text);
                assert!(!is_readable_now(&server).await);
                // With the ring, an abandoned receive gets the next data.
                let mut input = Buffer::new();
                assert!(poll_once(&mut Box::pin(server.recv(&mut input, 100))).await.is_pending());
                turns(2).await;
            }
            drop(client);
            poll_fn(|cx| server.poll_readable(cx)).await.unwrap();
            assert_eq!(server.recv(&mut Buffer::new(), 10).await.unwrap(), 0);
            assert!(is_readable_now(&server).await, "the end stays");
        }
    });
}

#[test]
fn writable_is_told_of_room() {
    run(async {
        for (server, client) in [tcp_pair().await, unix_pair()] {
            assert!(is_writable_now(&client).await);
            let mut output = Output::new();
            let mut sent = 0;
            loop {
                output.push(pattern(100_000));
                if timeout(Duration::from_millis(1), client.send_all(&mut output)).await.is_err() {
                    break;
                }
                sent += 100_000;
            }
            sent += 100_000 - output.len_bytes();
            assert!(!is_writable_now(&client).await);
            let waiting = poll_fn(|cx| client.poll_writable(cx));
            let (waited, received) = both(waiting, receive(&server, sent)).await;
            waited.unwrap();
            assert_eq!(received.len(), sent);
            assert!(is_writable_now(&client).await);
        }
    });
}

/// Waits for both futures in turn.
async fn both<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (Box::pin(a), Box::pin(b));
    let (mut first, mut second) = (None, None);
    poll_fn(|cx| {
        if first.is_none()
            && let std::task::Poll::Ready(value) = a.as_mut().poll(cx)
        {
            first = Some(value);
        }
        if second.is_none()
            && let std::task::Poll::Ready(value) = b.as_mut().poll(cx)
        {
            second = Some(value);
        }
        if first.is_some() && second.is_some() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    (first.unwrap(), second.unwrap())
}
