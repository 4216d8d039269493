//! grpc: who answers the calls of gRPC that the measured servers pass on: a Gale on the client's core, with the same
//! answer for every call. It looks at no message: what passes has the shape of unary calls, and no meaning.

use std::path::PathBuf;
use std::rc::Rc;

use crate::case::Directives;
use crate::options::Options;
use crate::servers::{Kind, Running, Setting};

/// A started server, and the message of each call.
#[derive(Debug)]
pub struct Grpc {
    port: String,
    pub body: PathBuf,
    /// It ends with this.
    _server: Running,
}

impl Grpc {
    /// A message of two bytes: not compressed, its length, itself.
    const QUESTION: &[u8] = b"\0\0\0\0\x02ok";

    /// What every call is answered with; a configuration has no zero bytes.
    pub const ANSWER: &[u8] = b"message";

    /// Starts it, if there is a Gale to be measured.
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

    /// What nginx and Gale are started with, to pass calls on.
    pub fn directives(&self) -> Directives {
        Directives {
            http: format!("http2 on; upstream calls {{ server 127.0.0.1:{}; keepalive 64; }}", self.port),
            server: "location = /grpc { grpc_pass grpc://calls; }".to_owned(),
        }
    }
}
