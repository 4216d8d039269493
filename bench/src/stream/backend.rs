//! Backends on the client's core: an echo, two sinks that count bytes or datagrams, and one that answers datagrams.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{DATAGRAM_BYTES, pin};

pub struct Backend {
    pub echo: SocketAddr,
    pub sink: SocketAddr,
    pub answers: SocketAddr,
    pub counts: SocketAddr,
    pub bytes: Arc<AtomicU64>,
    pub datagrams: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    _threads: Vec<JoinHandle<()>>,
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

impl Backend {
    pub fn start(core: usize) -> Backend {
        let (bytes, datagrams, is_over) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default(), Arc::default());
        let listener = || TcpListener::bind("127.0.0.1:0").expect("a port");
        let (echo, sink) = (listener(), listener());
        let socket = || {
            let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
            socket.set_read_timeout(Some(Duration::from_secs(1))).expect("an option");
            socket
        };
        let (answers, counts) = (socket(), socket());
        let (echo_at, sink_at) = (echo.local_addr().expect("bound"), sink.local_addr().expect("bound"));
        let (answers_at, counts_at) = (answers.local_addr().expect("bound"), counts.local_addr().expect("bound"));
        let spawn = |work: Box<dyn FnOnce() + Send>| {
            std::thread::spawn(move || {
                pin(&[core]);
                work();
            })
        };
        let (sunk, counted) = (Arc::clone(&bytes), Arc::clone(&datagrams));
        let ends: [Arc<AtomicBool>; 2] = [Arc::clone(&is_over), Arc::clone(&is_over)];
        let [answers_end, counts_end] = ends;
        let threads = vec![
            spawn(Box::new(move || {
                for stream in echo.incoming().flatten() {
                    std::thread::spawn(move || {
                        let (mut stream, mut bytes) = (stream, [0; 4096]);
                        let _ = stream.set_nodelay(true);
                        while let Ok(count @ 1..) = stream.read(&mut bytes) {
                            if stream.write_all(&bytes[..count]).is_err() {
                                return;
                            }
                        }
                    });
                }
            })),
            spawn(Box::new(move || {
                for mut stream in sink.incoming().flatten() {
                    let mut bytes = vec![0; 1 << 20];
                    while let Ok(count @ 1..) = stream.read(&mut bytes) {
                        sunk.fetch_add(count as u64, Ordering::SeqCst);
                    }
                }
            })),
            spawn(Box::new(move || {
                let mut bytes = [0; 2048];
                while !answers_end.load(Ordering::SeqCst) {
                    if let Ok((count, from)) = answers.recv_from(&mut bytes) {
                        let _ = answers.send_to(&bytes[..count], from);
                    }
                }
            })),
            spawn(Box::new(move || {
                let mut bytes = vec![0; 65536];
                while !counts_end.load(Ordering::SeqCst) {
                    if let Ok(count) = counts.recv(&mut bytes) {
                        counted.fetch_add(count.div_ceil(DATAGRAM_BYTES) as u64, Ordering::SeqCst);
                    }
                }
            })),
        ];
        Backend {
            echo: echo_at,
            sink: sink_at,
            answers: answers_at,
            counts: counts_at,
            bytes,
            datagrams,
            is_over,
            _threads: threads,
        }
    }
}
