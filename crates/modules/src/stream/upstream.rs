//! upstream: groups of servers that sessions are passed to. See [`shared::upstream`](crate::shared::upstream).
//!   upstream NAME { ... }                                        stream
//!   the directives of `shared::upstream`                         upstream
//!   $upstream_addr, $upstream_bytes_sent, $upstream_bytes_received
//!   $upstream_connect_time, $upstream_first_byte_time, $upstream_session_time
//! (<https://nginx.org/en/docs/stream/ngx_stream_upstream_module.html>)

use gale_config::Contexts;
use gale_engine::module::Module;
use gale_engine::variables::Variable;
use gale_stream::module::StreamPart;
use gale_stream::session::Session;
use gale_stream::session::attempts::Attempt;

use crate::shared::append::{append_number, append_seconds_or_dash};
use crate::shared::upstream;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_upstream",
    directives: &upstream::directives::<Session>(Contexts::STREAM),
    parts: &[&StreamPart {
        variables: &[
            Variable::named("upstream_addr", |session, _, out| {
                append_each(session, out, |attempt, out| out.extend_from_slice(attempt.peer.as_bytes()))
            }),
            Variable::named("upstream_bytes_sent", |session, _, out| {
                append_each(session, out, |attempt, out| _ = append_number(out, attempt.bytes_sent))
            }),
            Variable::named("upstream_bytes_received", |session, _, out| {
                append_each(session, out, |attempt, out| _ = append_number(out, attempt.bytes_received))
            }),
            Variable::named("upstream_connect_time", |session, _, out| {
                append_each(session, out, |attempt, out| append_seconds_or_dash(out, attempt.connect_time))
            }),
            Variable::named("upstream_first_byte_time", |session, _, out| {
                append_each(session, out, |attempt, out| append_seconds_or_dash(out, attempt.first_byte_time))
            }),
            Variable::named("upstream_session_time", |session, _, out| {
                append_each(session, out, |attempt, out| append_seconds_or_dash(out, attempt.session_time))
            }),
        ],
        ..StreamPart::EMPTY
    }],
    ..Module::EMPTY
};

/// Appends a part for each server that was tried. Returns `false` if there was none.
fn append_each(session: &Session, out: &mut Vec<u8>, append: impl Fn(&Attempt, &mut Vec<u8>)) -> bool {
    let Some(tried) = session.attempts.begun() else { return false };
    for (number, attempt) in tried.iter().enumerate() {
        if number > 0 {
            out.extend_from_slice(b", ");
        }
        append(attempt, out);
    }
    tried.iter().len() > 0
}
