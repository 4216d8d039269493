//! pass: hands a connection to another listening address of this process, of any protocol.
//!   pass ADDRESS;                                                server
//! (<https://nginx.org/en/docs/stream/ngx_stream_pass_module.html>)
//!
//! The new owner gets the bytes that were read ahead, and the TLS session if TLS was terminated here.

use bstr::ByteSlice;
use gale_base::log_level::Level;
use gale_config::server_address::ServerAddress;
use gale_config::{Contexts, Custom, Diagnostic, Statement};
use gale_engine::configuration::Builder;
use gale_engine::connections::pass_connection;
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;
use gale_process::ListenAddress;
use gale_stream::module::StreamPart;
use gale_stream::session::phases::Serve;
use gale_stream::session::{self, Client, Session};

use super::ROW;

/// Maximum number of times that a connection may be passed, as in nginx.
const PASSES_MAX: u32 = 10;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_pass",
    directives: &[Directive {
        name: "pass",
        contexts: Contexts::STREAM_SERVER,
        about: "Passes accepted connections to another listening socket of the configuration, given by its address.",
        store: &Custom(add_pass),
        ..ROW
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&StreamPart {
        content: Some(&Serve {
            applies: |conf: &Conf| conf.to.is_some(),
            serve: |session, conf| Box::pin(std::future::ready(pass(session, conf))),
        }),
        ..StreamPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    to: Option<To>,
}

enum To {
    Address(ListenAddress),
    Evaluated(Template<Session>),
}

fn add_pass(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.to.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let word = &statement.args[0];
    if word.text.contains(&b'$') {
        conf.to = Some(To::Evaluated(builder.variables::<Session>().template(word)?));
        return Ok(());
    }
    let address = address(&word.text).map_err(|wrong| match wrong {
        Wrong::Text(what) => {
            Diagnostic::emerg(format!("{what} in \"{}\" of the \"pass\" directive", word.text)).at(word.span)
        }
        Wrong::NoAddress => statement.directive_error("has no addresses"),
        Wrong::NoPort => statement.directive_error("has no port"),
    })?;
    conf.to = Some(To::Address(address));
    Ok(())
}

enum Wrong {
    /// A message in nginx's words.
    Text(&'static str),
    NoAddress,
    NoPort,
}

/// Parses an address. Host names are not resolved.
fn address(text: &[u8]) -> Result<ListenAddress, Wrong> {
    // A port alone stands for all IPv4 addresses.
    let text = if text.iter().all(u8::is_ascii_digit) { [b"0.0.0.0:", text].concat() } else { text.to_vec() };
    match ServerAddress::parse(&text, 0).map_err(Wrong::Text)? {
        ServerAddress::Unix(path) => Ok(ListenAddress::Unix(path)),
        ServerAddress::Inet(address) if address.port() == 0 => Err(Wrong::NoPort),
        ServerAddress::Inet(address) => Ok(ListenAddress::Inet(address)),
        ServerAddress::Host(..) => Err(Wrong::NoAddress),
    }
}

fn pass(session: &mut Session, conf: &Conf) -> u16 {
    const PASSING: &str = "while passing connection to port";
    if session.datagrams().is_some() {
        session.log(Level::Error, format_args!("cannot pass udp connection {PASSING}"));
        return session::INTERNAL_SERVER_ERROR;
    }
    let to = match conf.to.as_ref().expect("a location with this handler has the setting") {
        To::Address(address) => address.clone(),
        To::Evaluated(template) => {
            let text = template.evaluate(session);
            match address(&text) {
                Ok(address) => address,
                Err(wrong) => {
                    let what = match wrong {
                        Wrong::Text(what) => what,
                        Wrong::NoAddress => "no addresses",
                        Wrong::NoPort => "no port",
                    };
                    session.log(Level::Error, format_args!("{what} in pass \"{}\" {PASSING}", text.as_bstr()));
                    return session::INTERNAL_SERVER_ERROR;
                }
            }
        }
    };
    if session.connection().passes() >= PASSES_MAX {
        session.log(Level::Error, format_args!("stream pass cycle {PASSING}"));
        return session::INTERNAL_SERVER_ERROR;
    }
    let (remote, carried) = (session.remote().clone(), session.take_carried());
    let Client::Stream(transport) = session.take_client() else { return session::INTERNAL_SERVER_ERROR };
    transport.put_back(std::mem::take(&mut session.input));
    match pass_connection(session.worker(), &to, transport, remote, carried) {
        Ok(()) => session::OK,
        Err((transport, carried)) => {
            session.give_back_carried(carried);
            session.give_back(Client::Stream(transport));
            session.log(Level::Error, format_args!("port not found for \"{to}\" {PASSING}"));
            session::OK
        }
    }
}
