//! Many clients that do not read the response of a fast upstream server, or read a byte now and then: the upstream
//! connection is released early, memory is bounded, and no byte is lost.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use gale_protocol::http2::{StreamId, settings};
use serde_json::Value;

use crate::support::fuse::disk::{Condition, Disk};
use crate::support::http2::{Http2, frame, frame_type};
use crate::support::{
    Backend, Client, DEADLINE, Driver, Server, Serving, Setup, anonymous_memory, descriptor_limit, descriptors_of,
    has_own_mounts, resident_memory, turn_of_crowds, with_each_driver,
};

with_each_driver!(
    servers_are_free_long_before_clients_that_do_not_read,
    thousands_of_clients_that_read_a_byte_now_and_then_cost_their_buffers,
    streams_with_closed_windows_hold_64_kib,
);

const CLIENTS: usize = 200;

/// Size of each response: more than fits into the sockets' buffers and the server's own.
const BODY: usize = 2 << 20;

/// Maximum growth of the worker process for all clients: some 36 KiB of buffers for each (`proxy_buffers`,
/// `proxy_buffer_size`), pieces on their way to and from files, memory that the allocator keeps, and the overhead of a
/// debug build. The bodies are 400 MiB.
const GROWTH_MAX: u64 = 64 << 20;

/// A server that responds to every request with `body`, and reports when a response was read and its connection closed.
fn sending(body: &Arc<[u8]>, ended: Sender<()>) -> Serving {
    let body = Arc::clone(body);
    Backend::tcp().serve(move |_, client| {
        client.send(format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len()));
        client.send(&body);
        client.assert_closed();
        ended.send(()).expect("somebody counts");
        false
    })
}

fn servers_are_free_long_before_clients_that_do_not_read(driver: Driver) {
    let body: Arc<[u8]> = (0..BODY).map(|at| (at % 251) as u8).collect();
    let (ended, endings) = channel();
    let backend = sending(&body, ended);
    let text = format!(
        "proxy_temp_path %DIR%/proxy; send_timeout 1h;
         server {{ listen %TCP%; location / {{ proxy_pass http://{}; }} }}",
        backend.address
    );
    let server = Setup::http(driver, &text).replace("worker_connections 128", "worker_connections 1024").start();
    let worker = server.worker();
    let (before, _) = resident_memory(worker);
    let address = server.directory.address(1);
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| Client::tcp_with_small_buffer(address)).collect();
    clients.iter_mut().for_each(|client| client.send("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
    for number in 0..CLIENTS {
        endings.recv_timeout(DEADLINE).unwrap_or_else(|_| panic!("only {number} connections to the server ended"));
    }
    let (_, most) = resident_memory(worker);
    assert!(most < before + GROWTH_MAX, "from {before} to {most} bytes");
    // Another client is served meanwhile.
    let mut other = Client::tcp(address);
    assert_eq!(other.get("/").body.len(), BODY);
    // A few clients read their response; the others disconnect.
    for mut client in clients.into_iter().step_by(20) {
        let response = client.response();
        assert!(response.status == 200 && response.body[..] == body[..]);
    }
    server.stop();
}

/// Number of clients where descriptors allow it: each takes three of the worker process, for client, upstream and file,
/// and two of the test.
const THOUSANDS: usize = 4000;

/// Size of each response: more than `proxy_buffers` and the sockets, whose buffers are small, can hold.
const SHORT_BODY: usize = 192 << 10;

/// Maximum growth of the worker process for each client: a piece of 64 KiB, the size of one read, the state of a
/// request in flight, and memory that the allocator keeps.
const GROWTH_MAX_OF_ONE: u64 = 96 << 10;

fn thousands_of_clients_that_read_a_byte_now_and_then_cost_their_buffers(driver: Driver) {
    let _turn = turn_of_crowds();
    let count = THOUSANDS.min(descriptor_limit() / 5);
    let body: Arc<[u8]> = (0..SHORT_BODY).map(|at| (at % 251) as u8).collect();
    let (ended, endings) = channel();
    let backend = sending(&body, ended);
    let text = format!(
        "proxy_temp_path %DIR%/proxy; send_timeout 1h; proxy_buffer_size 4k; proxy_buffers 2 4k;
         proxy_busy_buffers_size 4k;
         server {{ listen %TCP% sndbuf=8k; location / {{ proxy_pass http://{}; }} }}",
        backend.address
    );
    let setup = Setup::http(driver, &text).replace("worker_connections 128", "worker_connections 16384");
    let server = setup.replace("error.log info", "error.log error").start();
    let worker = server.worker();
    let (before, _) = resident_memory(worker);
    let descriptors = descriptors_of(worker);
    let address = server.directory.address(1);
    let mut clients: Vec<Client> = Vec::new();
    // In batches no larger than the listen backlog and the number of threads of the backend.
    while clients.len() < count {
        let next = clients.len();
        clients.extend((0..100).map(|_| Client::tcp_with_small_buffer(address)));
        clients[next..].iter_mut().for_each(|client| client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n"));
        for _ in next..clients.len() {
            endings.recv_timeout(DEADLINE).unwrap_or_else(|_| panic!("behind {next} a connection did not end"));
        }
        // A byte, which is far less than has been sent.
        clients.iter_mut().for_each(Client::receive_byte);
    }
    // The client's socket and the file; the upstream connection is closed.
    assert!(descriptors_of(worker) < descriptors + 2 * clients.len() + 100, "{}", descriptors_of(worker));
    let (_, most) = resident_memory(worker);
    let grown = most.saturating_sub(before) / clients.len() as u64;
    assert!(grown < GROWTH_MAX_OF_ONE, "from {before} to {most}: {grown} bytes for each");
    assert_eq!(Client::tcp(address).get("/").body.len(), SHORT_BODY);
    for client in clients.iter_mut().step_by(100) {
        let response = client.response();
        assert!(response.status == 200 && response.body[..] == body[..]);
    }
    server.stop();
}

/// HTTP/2 connections, and streams on each.
const CONNECTIONS: usize = 8;
const STREAMS: usize = 100;

/// Size of each response.
const STREAM_BODY: usize = 256 << 10;

/// Memory that a stream with a closed window may hold, with the default `proxy_buffers` of 32 KiB.
const HELD_MAX: usize = 64 << 10;

/// Memory that may wait for the disk beyond 16 KiB of each stream, in all.
const PLENTY: usize = 8 << 20;

/// A client whose windows are closed from the beginning, with its requests.
fn closed(server: &Server) -> (Http2, Vec<StreamId>) {
    let mut client = Http2::unix(server);
    let settings = [&settings::id::INITIAL_WINDOW_SIZE.to_be_bytes()[..], &[0; 4]].concat();
    client.raw(frame(frame_type::SETTINGS, 0, 0, settings));
    let streams = (0..STREAMS).map(|_| client.begin("GET", "/", &[], true)).collect();
    client.flush();
    (client, streams)
}

/// Memory on lease of the loop, for each of the streams.
fn held(server: &Server) -> usize {
    let memory: Value = serde_json::from_slice(&server.get("/api/9/gale/memory").body).expect("JSON");
    memory["leased"].as_u64().expect("a number") as usize / (CONNECTIONS * STREAMS)
}

fn streams_with_closed_windows_hold_64_kib(driver: Driver) {
    let _turn = turn_of_crowds();
    let streams = CONNECTIONS * STREAMS;
    assert!(descriptor_limit() >= 5 * streams, "the limit of descriptors is too low for this test");
    let body: Arc<[u8]> = (0..STREAM_BODY).map(|at| (at % 251) as u8).collect();
    let (ended, endings) = channel();
    let backend = sending(&body, ended);
    // Without a disk that can hang, the streams are measured only when their files are written.
    let disk = if has_own_mounts() { Disk::mount() } else { None };
    let place = disk.as_ref().map_or("%DIR%".to_owned(), |disk| disk.point().display().to_string());
    let text = format!(
        "proxy_temp_path {place}/proxy; send_timeout 1h; http2_max_concurrent_streams {STREAMS};
         server {{ listen %UNIX%; http2 on; location / {{ proxy_pass http://{}; }} location /api {{ api; }} }}",
        backend.address
    );
    let setup = Setup::http(driver, &text).replace("worker_connections 128", "worker_connections 4096");
    let server = setup.replace("worker_processes 2;", "worker_processes 1;").start();
    let worker = server.worker();
    let before = anonymous_memory(worker);
    if let Some(disk) = &disk {
        disk.set(Condition::Hung);
    }
    let mut clients: Vec<_> = (0..CONNECTIONS).map(|_| closed(&server)).collect();
    if let Some(disk) = &disk {
        // The sum of `proxy_buffers` and a share of the bytes that may wait for the disk.
        server.look_until("full buffers", || held(&server) >= 40 << 10);
        let held = held(&server);
        assert!(held <= HELD_MAX + PLENTY / streams, "{held} bytes for each while the disk hangs");
        disk.set(Condition::Well);
    }
    for number in 0..streams {
        endings.recv_timeout(DEADLINE).unwrap_or_else(|_| panic!("only {number} connections to the server ended"));
    }
    assert!(held(&server) <= HELD_MAX, "{} bytes for each", held(&server));
    // With the state of each request, which is large in a debug build, and memory that the allocator keeps.
    let after = anonymous_memory(worker);
    let grown = after.saturating_sub(before) as usize / streams;
    assert!(grown <= 2 * HELD_MAX, "from {before} to {after}: {grown} bytes for each");
    // Nothing is lost of a stream whose window opens at last. The client's codec does not know that it was closed, so
    // it is opened for all of the body.
    for (client, streams) in &mut clients {
        for stream in [streams[0], streams[STREAMS / 2], streams[STREAMS - 1]] {
            client.raw(frame(frame_type::WINDOW_UPDATE, 0, stream, (STREAM_BODY as u32).to_be_bytes()));
            assert_eq!(client.answer(stream).body[..], body[..]);
        }
    }
    drop(clients);
    server.stop();
}
