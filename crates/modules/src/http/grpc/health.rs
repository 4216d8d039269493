//! `health_check … type=grpc`: health checks by the gRPC health checking protocol.
//!   health_check [interval=TIME] [jitter=TIME] [fails=N] [passes=N] [port=N] [mandatory [persistent]]
//!                [keepalive_time=TIME] type=grpc [grpc_service=NAME] [grpc_status=CODE];    location
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_hc_module.html#health_check>,
//! <https://github.com/grpc/grpc/blob/master/doc/health-checking.md>)
//!
//! A check uses the TLS settings, header fields and timeouts of the location. The row of the directive is in the proxy
//! module, which passes the arguments to this one.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bstr::BString;
use gale_config::Diagnostic;
use gale_engine::configuration::{Builder, ScopeId, ServerId};
use gale_http::configuration::builder::InHttp;
use gale_http::request::own::OwnRequest;
use gale_http_upstream::Http2Request;
use gale_http_upstream::client::{Answer, note_server};
use gale_protocol::http1::request_writer::Unwritable;
use gale_runtime::Bytes;
use gale_upstream::{AddressPass, CheckedPeer, PassTarget};
use gale_worker::Worker;

use super::{Conf, MODULE};
use crate::http::checking::{self, Asking, Failure, Kept, Question, Way};
use crate::http::upstream_head::{authority, write_set_fields};
use crate::shared::health_check::{Failed, Rules};

/// Path of the method.
const PATH: &[u8] = b"/grpc.health.v1.Health/Check";

/// Maximum length of a response's body that is read, in bytes: a message has two.
const BODY_MAX: usize = 1024;

/// Status of a successful call.
const OK: u8 = 0;

/// Names of statuses. (<https://grpc.io/docs/guides/status-codes/>)
const STATUSES: [&str; 17] = [
    "ok",
    "cancelled",
    "unknown",
    "invalid_argument",
    "deadline_exceeded",
    "not_found",
    "already_exists",
    "permission_denied",
    "resource_exhausted",
    "failed_precondition",
    "aborted",
    "out_of_range",
    "unimplemented",
    "internal",
    "unavailable",
    "data_loss",
    "unauthenticated",
];

/// The check of a location, before its settings are complete.
#[derive(Clone)]
pub(in crate::http) struct Draft {
    pub rules: Rules,
    pub server: ServerId,
    pub scope: ScopeId,
    pub keepalive_time: Duration,
    /// Name of the service; empty for the server as a whole.
    pub service: BString,
    /// Required status of the call.
    pub status: u8,
}

/// Parses a status, given by number or name.
pub(in crate::http) fn parse_status(text: &[u8]) -> Option<u8> {
    let text = std::str::from_utf8(text).ok()?;
    match text.parse::<usize>() {
        Ok(code) => (code < STATUSES.len()).then_some(code as u8),
        Err(_) => STATUSES.iter().position(|name| name.eq_ignore_ascii_case(text)).map(|code| code as u8),
    }
}

/// Stores the check of a location until its settings are complete. Returns `false` if the location has one already.
pub(in crate::http) fn keep(builder: &mut Builder, draft: Draft) -> bool {
    let is_own = |module: &&gale_engine::module::Module| std::ptr::eq(*module, &MODULE);
    let owner = builder.order.modules.iter().position(is_own).expect("the order contains this module");
    let make = MODULE.conf.as_ref().expect("it has settings").make;
    let conf = builder.http_mut().confs(draft.scope)[owner].get_or_insert_with(make);
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    conf.check.replace(draft).is_none()
}

/// Registers the check of a location when the location's settings are complete.
pub(super) fn complete(conf: &Conf, builder: &mut Builder) -> Result<(), Diagnostic> {
    let Some(draft) = &conf.check else { return Ok(()) };
    let wrong = |message: &str| Err(Diagnostic::emerg(message).at(draft.rules.span));
    let group = match &conf.pass {
        Some(AddressPass::Fixed(target)) => match target.servers {
            PassTarget::Referred(upstream) => upstream,
            _ => unreachable!("an address without variables refers to its servers"),
        },
        Some(AddressPass::Evaluated(..)) => {
            return wrong("\"health_check\" cannot be used with variables in \"grpc_pass\"");
        }
        None => return wrong("\"health_check\" with \"type=grpc\" requires \"grpc_pass\" in the same location"),
    };
    checking::add(builder, group, draft.clone())
}

impl Question for Draft {
    fn rules(&self) -> &Rules {
        &self.rules
    }

    fn location(&self) -> (ServerId, ScopeId) {
        (self.server, self.scope)
    }

    async fn ask(
        &self,
        worker: &Rc<Worker>,
        peer: &CheckedPeer,
        request: &mut OwnRequest,
        kept: &mut Option<Kept>,
    ) -> Result<(), Failure> {
        let configuration = Rc::clone(request.configuration());
        let conf: &Conf = configuration.http().scope(self.scope).conf_of().expect("its grpc settings");
        let Some(AddressPass::Fixed(target)) = &conf.pass else {
            unreachable!("the configuration requires a fixed target")
        };
        note_server(request, Arc::clone(&peer.name));
        let head = head(request, conf, &target.authority, target.tls_host.is_some());
        let asking = Asking::Http2 {
            head: head.map_err(|error| Failure::Request(error.to_string()))?,
            body: Some(question(&self.service)),
            head_max: conf.upstream.head_max(),
            body_max: BODY_MAX,
        };
        let way = Way {
            worker,
            address: self.rules.address(peer),
            options: conf.upstream.connect_options(request),
            header: conf.upstream.proxy_header(request),
            tls: target.tls_host.as_ref().map(|host| checking::tls(request, &conf.upstream, host)),
            patience: checking::patience(&conf.upstream),
            keepalive_time: self.keepalive_time,
        };
        let answer = way.ask(&asking, kept).await.map_err(Failure::Client)?;
        let failed = |what| Failure::Answer(Failed { text: format!("{what} while {CHECKING}"), action: CHECKING });
        judge(&answer, self.status).map_err(failed)
    }
}

fn head(request: &OwnRequest, conf: &Conf, host: &[u8], is_tls: bool) -> Result<Http2Request, Unwritable> {
    let scheme = if is_tls { "https" } else { "http" };
    let mut head = Http2Request::new(b"POST", scheme, &authority(request, &conf.set_headers, host), PATH)?;
    head.push(b"content-type", b"application/grpc")?;
    head.push(b"te", b"trailers")?;
    write_set_fields(request, &conf.set_headers, &mut head)?;
    Ok(head)
}

/// The action in messages about a response.
const CHECKING: &str = "checking gRPC status";

/// Returns a `HealthCheckRequest` with gRPC's prefix.
fn question(service: &[u8]) -> Bytes {
    let mut message = Vec::new();
    if !service.is_empty() {
        // Field 1, bytes.
        message.push(0x0a);
        let mut length = service.len();
        while length >= 0x80 {
            message.push(length as u8 | 0x80);
            length >>= 7;
        }
        message.push(length as u8);
        message.extend_from_slice(service);
    }
    // The prefix: not compressed, and the length.
    let length = u32::try_from(message.len()).expect("a word of a configuration").to_be_bytes();
    Bytes::from([&[0], &length[..], &message].concat())
}

/// Checks a response. The error describes the mismatch.
fn judge(answer: &Answer, wanted: u8) -> Result<(), String> {
    if answer.head.status != 200 {
        return Err(format!("unexpected status {}", answer.head.status));
    }
    let trailers = answer.trailers.iter().map(|(name, value)| (&name[..], &value[..]));
    let fields = answer.head.fields.iter().map(|field| (&field.name[..], &field.value[..]));
    // A response without a body has the status in its head.
    let told = trailers.chain(fields).find(|(name, _)| name.eq_ignore_ascii_case(b"grpc-status"));
    let Some((_, told)) = told else { return Err("no \"grpc-status\" in the response".to_owned()) };
    let status = std::str::from_utf8(told).ok().and_then(|text| text.parse::<u8>().ok());
    if status != Some(wanted) {
        return Err(format!("unexpected gRPC status \"{}\"", told.escape_ascii()));
    }
    match wanted == OK && serving_status(&answer.body) != Some(SERVING) {
        true => Err("the service is not serving".to_owned()),
        false => Ok(()),
    }
}

/// `HealthCheckResponse.SERVING`.
const SERVING: u64 = 1;

/// Returns the status in a `HealthCheckResponse`, or `None` if it is malformed.
fn serving_status(body: &[u8]) -> Option<u64> {
    let (&[compressed, a, b, c, d], rest) = body.split_first_chunk::<5>()?;
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).ok()?;
    let mut rest = rest.get(..length).filter(|_| compressed == 0)?;
    let mut status = 0;
    while !rest.is_empty() {
        let key = take_number(&mut rest)?;
        match (key >> 3, key & 7) {
            (1, 0) => status = take_number(&mut rest)?,
            (_, 0) => drop(take_number(&mut rest)?),
            (_, 1) => rest = rest.get(8..)?,
            (_, 2) => {
                let length = usize::try_from(take_number(&mut rest)?).ok()?;
                rest = rest.get(length..)?;
            }
            (_, 5) => rest = rest.get(4..)?,
            _ => return None,
        }
    }
    Some(status)
}

/// Takes a varint off the beginning.
fn take_number(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for place in 0..10 {
        let (&byte, behind) = rest.split_first()?;
        *rest = behind;
        number |= u64::from(byte & 0x7f) << (7 * place);
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_names_its_service() {
        assert_eq!(&question(b"")[..], [0, 0, 0, 0, 0]);
        assert_eq!(&question(b"a.B")[..], b"\0\0\0\0\x05\x0a\x03a.B");
        let long = question(&[b'x'; 300]);
        assert_eq!(&long[..8], b"\0\0\0\x01\x2f\x0a\xac\x02");
        assert_eq!(long.len(), 5 + 303);
    }

    #[test]
    fn answer_is_read_with_unknown_fields_beside_the_status() {
        let answer = |message: &[u8]| serving_status(&[&[0, 0, 0, 0, message.len() as u8], message].concat());
        assert_eq!(answer(b""), Some(0));
        assert_eq!(answer(b"\x08\x01"), Some(1));
        assert_eq!(answer(b"\x08\x02\x12\x03abc\x08\x01\x19\0\0\0\0\0\0\0\0\x25\0\0\0\0\x18\xff\x01"), Some(1));
        for broken in
            [&b"\x08"[..], b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x12\x09ab", b"\x0b", b"\x19\0"]
        {
            assert_eq!(answer(broken), None, "{broken:?}");
        }
        assert_eq!(
            [&b""[..], b"\0\0\0\0", b"\x01\0\0\0\x02\x08\x01", b"\0\0\0\0\x03\x08\x01"].map(serving_status),
            [None; 4]
        );
    }

    #[test]
    fn statuses_have_numbers_and_names() {
        let codes = ["0", "12", "UNIMPLEMENTED", "ok", "unauthenticated"].map(|text| parse_status(text.as_bytes()));
        assert_eq!(codes, [Some(0), Some(12), Some(12), Some(0), Some(16)]);
        assert_eq!(["17", "-1", "", "well"].map(|text| parse_status(text.as_bytes())), [None; 4]);
    }
}
