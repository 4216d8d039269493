//! Many clients that do not read the response of a fast upstream server, or read a byte now and then: the upstream
//! connection is released early, memory is bounded, and no byte is lost.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use crate::support::{
    Backend, Client, DEADLINE, Driver, Serving, Setup, descriptor_limit, descriptors_of, resident_memory,
    turn_of_crowds, with_each_driver,
};

with_each_driver!(
    servers_are_free_long_before_clients_that_do_not_read,
    thousands_of_clients_that_read_a_byte_now_and_then_cost_their_buffers,
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
