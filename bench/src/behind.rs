//! behind: the server to which the measured servers pass requests on: a floor on the client's core, which answers every
//! request with the same bytes.

use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::client::load;
use crate::process;
use crate::servers::{POLL_INTERVAL, free_port};

const START_TIME_LIMIT: Duration = Duration::from_secs(10);

/// A started server. It is ended when this is dropped.
#[derive(Debug)]
pub struct Behind {
    pub port: u16,
    pub body_bytes: usize,
    child: Child,
}

impl Behind {
    /// Starts it and waits until it answers.
    pub fn start(core: usize, body_bytes: usize) -> Result<Rc<Behind>, String> {
        let port = free_port()?;
        let own = std::env::current_exe().map_err(|error| format!("behind: {error}"))?;
        let mut command = Command::new(own);
        command.args(["floor", &port.to_string(), "epoll", "keep-alive", &body_bytes.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let behind = Behind { port, body_bytes, child: process::spawn_pinned(&mut command, &[core])? };
        let (address, deadline) = (format!("127.0.0.1:{port}"), Instant::now() + START_TIME_LIMIT);
        loop {
            match load::request_once(&address, "/", START_TIME_LIMIT) {
                Ok(body) if body.len() == body_bytes => return Ok(Rc::new(behind)),
                answer if Instant::now() >= deadline => {
                    return Err(format!("the server behind does not answer: {:?}", answer.map(|body| body.len())));
                }
                _ => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
