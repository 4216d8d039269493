//! Variables of the stream core module.
//! (<https://nginx.org/en/docs/stream/ngx_stream_core_module.html#variables>)

use gale_engine::connections::address_text;
use gale_engine::module::Module;
use gale_engine::variables::Variable;
use gale_engine::variables::subject::Subject;
use gale_stream::module::StreamPart;
use gale_stream::session::Session;

use crate::shared::append::{append, append_number, append_padded, append_seconds};
use crate::shared::variables::variables;

/// Variables that sessions share with the subjects of other protocols.
pub static COMMON: Module = Module {
    name: "stream_core",
    parts: &[&StreamPart { variables: &variables::<Session>(), ..StreamPart::EMPTY }],
    ..Module::EMPTY
};

pub(super) const VARIABLES: &[Variable<Session>] = &[
    Variable::named("remote_addr", |session: &Session, _, out| {
        if session.is_remote_set() {
            return append(out, address_text(session.remote()).as_bytes());
        }
        append(out, session.connection().remote_text().as_bytes())
    }),
    Variable::named("server_name", |session: &Session, _, out| {
        append(out, &session.stream().server(session.server()).name)
    }),
    Variable::named("protocol", |session: &Session, _, out| append(out, session.protocol().as_bytes())),
    Variable::named("bytes_received", |session: &Session, _, out| append_number(out, session.received())),
    Variable::named("bytes_sent", |session: &Session, _, out| append_number(out, session.sent())),
    Variable::named("session_time", |session: &Session, _, out| {
        append_seconds(out, gale_runtime::now().since(session.connection().accepted))
    }),
    Variable::named("status", |session: &Session, _, out| {
        append_padded(out, session.status().into(), 3);
        true
    }),
];
