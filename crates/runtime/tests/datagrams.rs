//! Datagram sockets on the real kernel: whole datagrams, their senders, errors, and senders that are ignored.

pub(crate) mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::future::poll_fn;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::task::Poll;
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
        // Several at once, shorter than the buffer: a short datagram is not taken for the last one.
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
fn too_long_datagram_is_lost_and_the_next_one_arrives() {
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
fn closed_port_is_an_error_and_the_socket_goes_on() {
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

fn inet(address: &str) -> SocketAddress {
    SocketAddress::Inet(address.parse::<SocketAddr>().unwrap())
}

/// A socket at this address with all metadata turned on.
fn telling(address: &str) -> std::io::Result<Datagram> {
    let options = DatagramOptions { local: Some(inet(address)), local_address: true, ecn: true, ..Default::default() };
    options.open()
}

/// This many datagrams with their metadata.
async fn received_in_batches(socket: &Datagram, count: usize) -> Vec<(Received, Vec<u8>)> {
    let mut batch = ReceiveBatch::new(BATCH_MAX, 2048);
    let mut all = Vec::new();
    while all.len() < count {
        assert!(socket.recv_batch(&mut batch).await.unwrap() > 0);
        all.extend(batch.iter().map(|(one, bytes)| (one.clone(), bytes.to_vec())));
    }
    assert_eq!(all.len(), count);
    all
}

#[test]
fn batches_hold_datagrams_in_order_and_no_memory_while_they_wait() {
    run(async {
        let server = Datagram::bind(&any_port()).unwrap();
        let client = Datagram::connect(&server.local_address().unwrap()).unwrap();
        let texts: Vec<Vec<u8>> = (0..100).map(pattern).collect();
        let transmits: Vec<_> = texts.iter().map(|text| Transmit::to_peer(text)).collect();
        let mut sent = 0;
        while sent < transmits.len() {
            sent += client.try_send_batch(&transmits[sent..]).unwrap();
        }
        let received = received_in_batches(&server, texts.len()).await;
        assert!(received.iter().map(|(_, bytes)| bytes).eq(&texts));
        let source = client.local_address().unwrap();
        let is_plain = |one: &Received| one.source == source && !one.is_truncated && one.local.is_none();
        assert!(received.iter().all(|(one, _)| is_plain(one)));

        let mut batch = ReceiveBatch::new(4, 1000);
        client.send(b"one").unwrap();
        server.recv_batch(&mut batch).await.unwrap();
        assert_eq!(leased_bytes(), 4096);
        assert!(poll_once(&mut Box::pin(server.recv_batch(&mut batch))).await.is_pending());
        assert_eq!((leased_bytes(), batch.len()), (0, 0));
    });
}

#[test]
fn a_wildcard_socket_answers_from_the_address_that_was_asked() {
    run(async {
        let both = [("0.0.0.0:0", "127.0.0.5"), ("[::]:0", "127.0.0.6"), ("[::]:0", "::1")];
        for (wildcard, asked) in both {
            let server = match telling(wildcard) {
                Ok(server) => server,
                Err(error) if wildcard.starts_with('[') => {
                    eprintln!("{error}");
                    return skip("no IPv6 here");
                }
                Err(error) => panic!("{error}"),
            };
            let port = server.local_address().unwrap().inet().unwrap().port();
            let asked: IpAddr = asked.parse().unwrap();
            // Receives only from the address that it sends to.
            let client = match Datagram::connect(&SocketAddr::new(asked, port).into()) {
                Ok(client) => client,
                Err(error) if asked.is_ipv6() => {
                    eprintln!("{error}");
                    return skip("no IPv6 here");
                }
                Err(error) => panic!("{error}"),
            };
            client.send(b"question").unwrap();
            let (question, bytes) = received_in_batches(&server, 1).await.pop().unwrap();
            assert_eq!(question.local.map(|ip| ip.to_canonical()), Some(asked));
            let transmit = Transmit { source: question.local, ..Transmit::to(&question.source, &bytes) };
            assert_eq!(server.try_send_batch(&[transmit]).unwrap(), 1);
            assert_eq!(received(&client).await.0, b"question");
        }
    });
}

#[test]
fn congestion_marks_arrive_as_they_were_sent() {
    run(async {
        for (wildcard, asked) in [("0.0.0.0:0", "127.0.0.1"), ("[::]:0", "127.0.0.1"), ("[::]:0", "::1")] {
            let Ok(server) = telling(wildcard) else { return skip("no IPv6 here") };
            let port = server.local_address().unwrap().inet().unwrap().port();
            let address = SocketAddr::new(asked.parse().unwrap(), port).into();
            let Ok(client) = Datagram::connect(&address) else { return skip("no IPv6 here") };
            let marks = [Some(Ecn::Ect0), Some(Ecn::Ect1), Some(Ecn::Ce), None];
            let transmits = marks.map(|ecn| Transmit { ecn, ..Transmit::to_peer(b"marked") });
            assert_eq!(client.try_send_batch(&transmits).unwrap(), marks.len());
            let received = received_in_batches(&server, marks.len()).await;
            assert!(received.iter().map(|(one, _)| one.ecn).eq(marks));
        }
    });
}

#[test]
fn a_truncated_datagram_is_told_as_such() {
    run(async {
        let server = Datagram::bind(&any_port()).unwrap();
        let client = Datagram::connect(&server.local_address().unwrap()).unwrap();
        client.send(b"too long for it").unwrap();
        client.send(b"fits it.").unwrap();
        let mut batch = ReceiveBatch::new(1, 8);
        for (bytes, is_truncated) in [(b"too long", true), (b"fits it.", false)] {
            assert_eq!(server.recv_batch(&mut batch).await.unwrap(), 1);
            let (one, received) = batch.iter().next().unwrap();
            assert_eq!((received, one.is_truncated), (&bytes[..], is_truncated));
        }
    });
}

#[test]
fn a_datagram_that_is_received_alone_leaves_the_next_one() {
    run(async {
        let server = Datagram::bind(&any_port()).unwrap();
        let client = Datagram::connect(&server.local_address().unwrap()).unwrap();
        let mut batch = ReceiveBatch::new(4, 8);
        assert!(poll_once(&mut poll_fn(|cx| client.poll_recv_single(cx, &mut batch))).await.is_pending());
        for bytes in [&b"too long for it"[..], b"", b"fits it."] {
            server.send_to(bytes, &client.local_address().unwrap()).unwrap();
        }
        for (bytes, is_truncated) in [(&b"too long"[..], true), (b"", false), (b"fits it.", false)] {
            assert_eq!(poll_fn(|cx| client.poll_recv_single(cx, &mut batch)).await.unwrap(), 1);
            let (one, received) = batch.iter().next().unwrap();
            assert_eq!((received, one.stride, one.is_truncated), (bytes, bytes.len().max(1), is_truncated));
            batch.clear();
        }
    });
}

#[test]
fn segments_leave_as_datagrams_and_are_joined_where_that_is_wanted() {
    run(async {
        for gro in [false, true] {
            let options = DatagramOptions { local: Some(any_port()), gro, ..DatagramOptions::default() };
            let server = options.open().unwrap();
            let client = Datagram::connect(&server.local_address().unwrap()).unwrap();
            let sent = pattern(3500);
            let transmit = Transmit { segment_bytes: Some(1000), ..Transmit::to_peer(&sent) };
            assert_eq!(client.try_send_batch(&[transmit]).unwrap(), 1);
            let mut batch = ReceiveBatch::new(8, 65536);
            let (mut bytes, mut lengths, mut is_joined) = (Vec::new(), Vec::new(), false);
            while bytes.len() < sent.len() {
                server.recv_batch(&mut batch).await.unwrap();
                for (one, joined) in batch.iter() {
                    is_joined |= one.stride < one.length;
                    lengths.extend(joined.chunks(one.stride).map(<[u8]>::len));
                    bytes.extend_from_slice(joined);
                }
            }
            assert_eq!((bytes, lengths, is_joined), (sent, vec![1000, 1000, 1000, 500], gro));
        }
    });
}

#[test]
fn neighbours_of_one_length_leave_in_one_piece_and_arrive_as_they_were() {
    run(async {
        let options = DatagramOptions { local: Some(any_port()), gro: true, ..DatagramOptions::default() };
        let (server, other) = (options.open().unwrap(), options.open().unwrap());
        let (address, other_address) = (server.local_address().unwrap(), other.local_address().unwrap());
        let client = Datagram::bind(&any_port()).unwrap();
        let sent = pattern(4000);
        // The last one has another destination, and one in the middle is empty.
        let lengths = [1000, 1000, 500, 0, 700, 700];
        let mut transmits = Vec::new();
        for length in lengths {
            transmits.push(Transmit { may_join: true, ..Transmit::to(&address, &sent[..length]) });
        }
        transmits.push(Transmit { may_join: true, ..Transmit::to(&other_address, &sent[..700]) });
        assert_eq!(client.try_send_batch(&transmits).unwrap(), transmits.len());
        let mut batch = ReceiveBatch::new(8, 65536);
        let (mut arrived, mut pieces) = (Vec::new(), 0);
        while arrived.len() < lengths.len() {
            pieces += server.recv_batch(&mut batch).await.unwrap();
            for (one, joined) in batch.iter() {
                let whole = joined.is_empty().then_some(joined);
                arrived.extend(joined.chunks(one.stride).chain(whole).map(<[u8]>::to_vec));
            }
        }
        assert_eq!(arrived, lengths.map(|length| sent[..length].to_vec()));
        assert_eq!(pieces, 3);
        other.recv_batch(&mut batch).await.unwrap();
        assert_eq!(batch.iter().next().unwrap().1, &sent[..700]);
    });
}

#[test]
fn sender_that_waits_for_room_is_woken() {
    run(async {
        let directory = Directory::new();
        let address = SocketAddress::unix(directory.path("datagrams.sock"));
        let server = Datagram::bind(&address).unwrap();
        let client = Datagram::connect(&address).unwrap();
        poll_fn(|cx| client.poll_send_ready(cx)).await.unwrap();
        for _ in 0..3 {
            // A Unix socket holds some datagrams and refuses the next one; UDP drops those without room.
            let sent =
                (0..10_000).find(|_| client.send(b"one").is_err_and(|error| error.kind() == ErrorKind::WouldBlock));
            let sent = sent.expect("it is full at some time");
            assert!(poll_fn(|cx| Poll::Ready(client.poll_send_ready(cx).is_pending())).await);
            let mut waiting = Box::pin(poll_fn(|cx| client.poll_send_ready(cx)));
            assert!(poll_once(&mut waiting).await.is_pending());
            let drained = async {
                for _ in 0..sent {
                    assert_eq!(received(&server).await.0, b"one");
                }
            };
            drained.await;
            waiting.await.unwrap();
            client.send(b"more").unwrap();
            assert_eq!(received(&server).await.0, b"more");
        }
    });
}

#[test]
fn a_socket_that_is_bound_already_is_adopted_with_options() {
    run(async {
        let bound = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = bound.local_addr().unwrap();
        let options = DatagramOptions { local_address: true, ..DatagramOptions::default() };
        let server = options.adopt(bound.into()).unwrap();
        let client = Datagram::connect(&address.into()).unwrap();
        client.send(b"hello").unwrap();
        let (one, bytes) = received_in_batches(&server, 1).await.pop().unwrap();
        assert_eq!((one.local, &bytes[..]), (Some(address.ip()), &b"hello"[..]));
    });
}
