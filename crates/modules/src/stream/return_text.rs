//! return: sends a text to the client and closes the connection.
//!   return TEXT;                                                 server
//! (<https://nginx.org/en/docs/stream/ngx_stream_return_module.html>)

use std::future::poll_fn;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_config::{Contexts, Custom, Diagnostic, Statement};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;
use gale_runtime::Output;
use gale_stream::module::StreamPart;
use gale_stream::session::phases::Serve;
use gale_stream::session::{self, Session};

use super::ROW;

/// Timeout of a client that accepts no byte of the text. (nginx relies on the kernel's timeout.)
const SEND_TIMEOUT: Duration = Duration::from_secs(60);

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_return",
    directives: &[Directive {
        name: "return",
        contexts: Contexts::STREAM_SERVER,
        about: "Sends a text to the client and closes the connection.",
        store: &Custom(add_return),
        ..ROW
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&StreamPart {
        content: Some(&Serve {
            applies: |conf: &Conf| conf.text.is_some(),
            serve: |session, conf| Box::pin(send(session, conf)),
        }),
        ..StreamPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    text: Option<Template<Session>>,
}

fn add_return(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.text.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    conf.text = Some(builder.variables::<Session>().template(&statement.args[0])?);
    Ok(())
}

async fn send(session: &mut Session, conf: &Conf) -> u16 {
    const SENDING: &str = "while sending to client";
    let text = conf.text.as_ref().expect("a location with this handler has the setting").evaluate(session);
    if text.is_empty() {
        return session::OK;
    }
    if let Some(client) = session.datagrams() {
        let length = text.len();
        if client.send(&text).is_ok() {
            session.count_sent(length);
        }
        return session::OK;
    }
    let Some(transport) = session.transport() else { return session::OK };
    let mut output = Output::new();
    output.push(text);
    while !output.is_empty() {
        let sent = poll_fn(|context| transport.poll_send(context, &mut output));
        match gale_runtime::timeout(SEND_TIMEOUT, sent).await {
            Ok(Ok(count)) => session.count_sent(count),
            Ok(Err(error)) => {
                let error = OsErrorText(&error);
                session.log(Level::Info, format_args!("send() failed {error} {SENDING}"));
                return session::OK;
            }
            Err(_) => {
                session.log(Level::Info, format_args!("client timed out (110: Connection timed out) {SENDING}"));
                return session::OK;
            }
        }
    }
    session.linger().await;
    session::OK
}
