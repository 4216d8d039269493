//! Datagram sockets on the real kernel: whole datagrams, their senders, errors, and who is not heard.

mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::io::ErrorKind;
use std::time::Duration;

use common::*;
use gale_runtime::*;

async fn received(socket: &Datagram) -> (Vec<u8>, SocketAddress) {
    let mut bytes = [0; 100];
    let (length, sender) = socket.recv(&mut bytes).await.unwrap();
    (bytes[..length].to_vec(), sender)
}

#[test]
fn datagrams_arrive_whole_with_their_sender() {
    run(async {
        let server = Datagram::bind(&any_port()).unwrap();
        let client = Datagram::connect(&server.local_address().unwrap()).unwrap();
        // Several at once, shorter than the buffer: none of them is the last because it is short.
        for text in [&b"one"[..], b"", b"three"] {
            client.send(text).unwrap();
        }
        for text in [&b"one"[..], b"", b"three"] {
            assert_eq!(received(&server).await, (text.to_vec(), client.local_address().unwrap()));
        }
        server.send_to(b"back", &client.local_address().unwrap()).unwrap();
        assert_eq!(received(&client).await, (b"back".to_vec(), server.local_address().unwrap()));
    });
}

#[test]
fn a_receiver_that_waits_is_woken() {
    run(async {
        let server = Datagram::bind(&any_port()).unwrap();
        let address = server.local_address().unwrap();
        spawn(async move {
            for _ in 0..3 {
                let (bytes, sender) = received(&server).await;
                server.send_to(&bytes, &sender).unwrap();
            }
        });
        let client = Datagram::connect(&address).unwrap();
        for text in [&b"one"[..], b"two", b"three"] {
            client.send(text).unwrap();
            assert_eq!(received(&client).await.0, text);
        }
    });
}

#[test]
fn what_has_no_place_is_lost_and_the_next_one_is_not() {
    run(async {
        let server = Datagram::bind(&any_port()).unwrap();
        let client = Datagram::connect(&server.local_address().unwrap()).unwrap();
        client.send(b"too long for it").unwrap();
        client.send(b"short").unwrap();
        let mut bytes = [0; 8];
        assert_eq!(server.recv(&mut bytes).await.unwrap().0, 8);
        assert_eq!(&bytes, b"too long");
        assert_eq!(server.recv(&mut bytes).await.unwrap().0, 5);
    });
}

#[test]
fn a_connected_socket_hears_its_peer_alone() {
    run(async {
        let server = Datagram::bind(&any_port()).unwrap();
        let client = Datagram::connect(&server.local_address().unwrap()).unwrap();
        let stranger = Datagram::bind(&any_port()).unwrap();
        let address = client.local_address().unwrap();
        stranger.send_to(b"forged", &address).unwrap();
        server.send_to(b"true", &address).unwrap();
        assert_eq!(received(&client).await.0, b"true");
    });
}

#[test]
fn a_port_where_nobody_listens_is_told_and_the_socket_goes_on() {
    run(async {
        let server = Datagram::bind(&any_port()).unwrap();
        let address = server.local_address().unwrap();
        drop(server);
        turns(3).await;
        let client = Datagram::connect(&address).unwrap();
        client.send(b"hello").unwrap();
        let mut bytes = [0; 8];
        assert_eq!(client.recv(&mut bytes).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let waiting = timeout(Duration::from_millis(10), client.recv(&mut bytes)).await;
        assert!(waiting.is_err(), "told once");
        let server = Datagram::bind(&address).unwrap();
        client.send(b"again").unwrap();
        assert_eq!(received(&server).await.0, b"again");
        server.send_to(b"back", &client.local_address().unwrap()).unwrap();
        assert_eq!(received(&client).await.0, b"back");
    });
}

#[test]
fn a_dropped_receive_loses_no_datagram() {
    run(async {
        let server = Datagram::bind(&any_port()).unwrap();
        let client = Datagram::connect(&server.local_address().unwrap()).unwrap();
        let mut bytes = [0; 8];
        let mut receiving = Box::pin(server.recv(&mut bytes));
        assert!(poll_once(&mut receiving).await.is_pending());
        turns(2).await;
        drop(receiving);
        client.send(b"hello").unwrap();
        turns(2).await;
        assert_eq!(received(&server).await.0, b"hello");
    });
}
