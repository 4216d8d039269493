//! grpc: a backend for gRPC calls: a Gale on the client's core that sends the same answer to every call. It does not
//! parse messages; they only have the form of unary calls.

use std::path::PathBuf;
use std::rc::Rc;

use crate::case::Directives;
use crate::options::Options;
use crate::servers::{Kind, Running, Setting};

/// A running backend, and the message of each call.
#[derive(Debug)]
pub struct Grpc {
    port: String,
    pub body: PathBuf,
    _server: Running,
}

impl Grpc {
    /// A message of two bytes: compression flag, length, contents.
    const QUESTION: &[u8] = b"\0\0\0\0\x02ok";

    /// The answer to every call. It is text, because a configuration cannot contain zero bytes.
    pub const ANSWER: &[u8] = b"message";

    /// Starts the backend, if a Gale is available.
    pub fn start(options: &Options) -> Result<Option<Rc<Grpc>>, String> {
        let programs = options.servers(Some(&["gale"]))?;
        let Some(program) = programs.iter().find(|program| program.kind == Kind::Gale) else { return Ok(None) };
        let answer = String::from_utf8_lossy(Grpc::ANSWER);
        let setting = Setting {
            cores: Some(vec![options.client_core]),
            http: "http2 on;".to_owned(),
            server: format!(
                "location = /grpc {{ default_type application/grpc; add_header grpc-status 0; return 200 {answer}; }}"
            ),
            ..Setting::default()
        };
        let server = program.start(setting)?;
        let body = server.directory().join("question");
        std::fs::write(&body, Grpc::QUESTION).map_err(|error| format!("{}: {error}", body.display()))?;
        let port = server.address.rsplit(':').next().unwrap_or_default().to_owned();
        Ok(Some(Rc::new(Grpc { port, body, _server: server })))
    }

    /// Returns the directives of nginx and Gale for proxying calls.
    pub fn directives(&self) -> Directives {
        Directives {
            http: format!("http2 on; upstream calls {{ server 127.0.0.1:{}; keepalive 64; }}", self.port),
            server: "location = /grpc { grpc_pass grpc://calls; }".to_owned(),
        }
    }
}
