//! Reads the PROXY protocol header at the beginning of a connection, if the address requires one.
//! (<https://nginx.org/en/docs/stream/ngx_stream_core_module.html#proxy_protocol_timeout>)

use std::future::poll_fn;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::variables::subject::Subject;
use gale_protocol::proxy_protocol::{self, ProxyOffence};

use crate::session::{self, Session};

impl Session {
    /// Reads the header. Bytes behind it stay in the input. The error is the final status of the session.
    pub(super) async fn read_proxy_header(&mut self) -> Result<(), u16> {
        const READING: &str = "while reading PROXY protocol";
        let timeout = *self.core().proxy_protocol_timeout.get();
        let reading = async {
            loop {
                match self.connection.take_proxy_header(&mut self.input) {
                    Ok(false) => {}
                    Ok(true) => return Ok(()),
                    Err(offence) => {
                        self.log(Level::Error, format_args!("{offence} {READING}"));
                        return Err(session::BAD_REQUEST);
                    }
                }
                let mut input = std::mem::take(&mut self.input);
                let transport = self.transport().expect("a header comes on a connection");
                let received =
                    poll_fn(|context| transport.poll_recv(context, &mut input, proxy_protocol::LENGTH_MAX)).await;
                self.input = input;
                match received {
                    Ok(0) => {
                        let cut = ProxyOffence::Broken(self.input.readable().into());
                        self.log(Level::Error, format_args!("{cut} {READING}"));
                        return Err(session::BAD_REQUEST);
                    }
                    Ok(_) => {}
                    Err(error) => {
                        let error = OsErrorText(&error);
                        self.log(Level::Info, format_args!("recv() failed {error} {READING}"));
                        return Err(session::OK);
                    }
                }
            }
        };
        let read = gale_runtime::timeout(timeout, reading).await;
        let read = read.unwrap_or_else(|_| {
            self.log(Level::Info, format_args!("client timed out (110: Connection timed out) {READING}"));
            Err(session::OK)
        });
        // Bytes behind the header are the client's. They are counted here, unless they are encrypted.
        if !self.place().listening.ssl {
            self.count_received(self.input.len());
        }
        read
    }
}
