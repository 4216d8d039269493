//! upstream_hc: periodic health checks of servers.
//!   health_check [interval=TIME] [jitter=TIME] [fails=N] [passes=N] [mandatory [persistent]] [match=NAME] [port=N]
//!                [udp];                                          server
//!   health_check_timeout TIME;                                   stream, server
//!   match NAME { send TEXT; expect [~ | ~*] TEXT; }              stream
//! (<https://nginx.org/en/docs/stream/ngx_stream_upstream_hc_module.html>)
//!
//! The part shared with http is in [`shared::health_check`](crate::shared::health_check). An expected text must be the
//! beginning of the response; a regular expression may match anywhere in it. At most `proxy_buffer_size` bytes are
//! read.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bstr::{BStr, BString, ByteSlice};
use gale_base::log_level::Level;
use gale_config::{Body, Contexts, Custom, Diagnostic, One, Setting, Span, Statement, Takes, Word, slot, values};
use gale_engine::configuration::{Builder, Configuration, ScopeId, ScopeRef, ServerId};
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::regex::Regex;
use gale_runtime::Bytes;
use gale_stream::configuration::builder::InStream;
use gale_stream::configuration::{Configured, StreamConfiguration};
use gale_stream::module::StreamPart;
use gale_stream::session::Session;
use gale_stream::upstream::health::{CheckError, Question, Verdict, ask};
use gale_stream::upstream::settings::ProxySettings;
use gale_upstream::{Check, CheckId, CheckedPeer};
use gale_worker::Worker;
use gale_worker::service::{Context, Service, ServiceSpec};

use super::ROW;
use crate::shared::check_row;
use crate::shared::health_check::{Asks, CheckLog, Failed, Rules, run};
use crate::shared::limits::invalid_parameter;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_upstream_hc",
    directives: &[
        Directive {
            name: "health_check",
            contexts: Contexts::STREAM_SERVER,
            takes: Takes::AtLeast(0),
            about: "Enables periodic health checks of the servers to which sessions are passed.",
            store: &Custom(health_check),
            ..ROW
        },
        Directive {
            name: "health_check_timeout",
            default: "5s",
            about: "Sets the timeout of a health check.",
            store: &One { parse: values::time_ms, slot: slot!(Conf, timeout) },
            ..ROW
        },
        Directive {
            name: "match",
            contexts: Contexts::STREAM,
            body: Body::Block,
            about: "Defines the text that a health check sends to a server, and the response that it expects.",
            store: &Custom(match_block),
            ..ROW
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&StreamPart::EMPTY],
};

#[derive(Default)]
struct Conf {
    check: Option<Draft>,
    timeout: Setting<Duration>,
    matches: Vec<Arc<Match>>,
}

/// The check of a server, before its settings are complete.
#[derive(Clone)]
struct Draft {
    rules: Rules,
    scope: ScopeId,
    is_udp: bool,
}

struct Match {
    name: BString,
    span: Span,
    send: Option<Bytes>,
    expect: Option<Expect>,
}

enum Expect {
    /// The response begins with this text.
    Text(Vec<u8>),
    Expression(Regex),
}

impl Expect {
    fn judge(&self, bytes: &[u8]) -> Verdict {
        match self {
            Expect::Text(text) if bytes.starts_with(text) => Verdict::Good,
            Expect::Text(text) if text.starts_with(bytes) => Verdict::NeedMore,
            Expect::Text(_) => Verdict::Bad,
            Expect::Expression(expression) if expression.is_match(bytes) == Ok(true) => Verdict::Good,
            Expect::Expression(_) => Verdict::NeedMore,
        }
    }
}

fn health_check(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.check.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let ScopeRef::Block(scope) = builder.scope else { unreachable!("a server is inside of the stream block") };
    let mut is_udp = false;
    let rules = Rules::parse(statement, |word| {
        let is_own = word.text == "udp";
        is_udp |= is_own;
        Ok(is_own)
    })?;
    rules.port.into_iter().for_each(|port| builder.reach.connects(port));
    conf.check = Some(Draft { rules, scope, is_udp });
    Ok(())
}

fn match_block(conf: &mut Conf, _: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let name = &statement.args[0];
    if let Some(first) = conf.matches.iter().find(|known| known.name == name.text) {
        let error = Diagnostic::emerg(format!("duplicate match \"{}\"", name.text)).at(name.span);
        return Err(error.related("first defined", first.span));
    }
    let mut own = Match { name: name.text.clone(), span: name.span, send: None, expect: None };
    for row in statement.body() {
        check_row(row)?;
        let wrong_count = || row.error(format!("invalid number of arguments in \"{}\" directive", row.name.text));
        let is_duplicate = match &**row.name.text {
            b"send" => {
                let [text] = row.args.as_slice() else { return Err(wrong_count()) };
                own.send.replace(Bytes::from(unescaped(&text.text))).is_some()
            }
            b"expect" => {
                let expect = match row.args.as_slice() {
                    [text] => Expect::Text(unescaped(&text.text)),
                    [operator, pattern] => expression(operator, pattern)?,
                    _ => return Err(wrong_count()),
                };
                own.expect.replace(expect).is_some()
            }
            name => {
                let message = format!("unknown directive \"{}\"", name.as_bstr());
                return Err(Diagnostic::emerg(message).at(row.name.span));
            }
        };
        if is_duplicate {
            return Err(row.directive_error("is duplicate"));
        }
    }
    conf.matches.push(Arc::new(own));
    Ok(())
}

fn expression(operator: &Word, pattern: &Word) -> Result<Expect, Diagnostic> {
    let is_caseless = match &**operator.text {
        b"~" => false,
        b"~*" => true,
        _ => return Err(invalid_parameter(operator)),
    };
    let expression = Regex::compile(&pattern.text, is_caseless);
    expression.map(Expect::Expression).map_err(|error| Diagnostic::emerg(error).at(pattern.span))
}

/// Returns a text with each `\xNN` replaced by its byte.
fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, behind)) = rest.split_first() {
        let digits = behind.strip_prefix(b"x").and_then(|digits| digits.get(..2)).filter(|_| first == b'\\');
        let byte = digits.and_then(|digits| u8::from_str_radix(digits.to_str().ok()?, 16).ok());
        match byte {
            Some(byte) => {
                bytes.push(byte);
                rest = &behind[3..];
            }
            None => {
                bytes.push(first);
                rest = behind;
            }
        }
    }
    bytes
}

/// Registers the check of a server when the server's settings are complete.
fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    if let Some(parent) = parent.and_then(|parent| parent.downcast_ref::<Conf>()) {
        conf.matches = parent.matches.clone();
    }
    let Some(draft) = &conf.check else { return Ok(()) };
    let wrong = |message: &str| Err(Diagnostic::emerg(message).at(draft.rules.span));
    let group = match builder.stream_mut().pass_of(draft.scope) {
        None => return wrong("\"health_check\" requires \"proxy_pass\" in the same server"),
        Some(None) => return wrong("\"health_check\" cannot be used with variables in \"proxy_pass\""),
        Some(Some(group)) => group,
    };
    let find = |name: &Word| {
        let found = conf.matches.iter().find(|known| known.name == name.text);
        let unknown = || Diagnostic::emerg(format!("unknown match \"{}\"", name.text)).at(name.span);
        found.cloned().ok_or_else(unknown)
    };
    let matches = draft.rules.matches.as_ref().map(find).transpose()?;
    // UDP does not acknowledge datagrams, so only an expected response shows that the peer works.
    if draft.is_udp && matches.as_ref().is_none_or(|matches| matches.send.is_none() || matches.expect.is_none()) {
        return wrong("\"health_check\" with \"udp\" requires a match with \"send\" and \"expect\"");
    }
    let id = builder.stream_mut().upstreams.add_check(group, draft.rules.before, draft.rules.span);
    let name = format!("health check {} of stream upstreams", id.0 + 1);
    let service = HealthCheck { id, draft: draft.clone(), matches, timeout: *conf.timeout.get() };
    builder.add_service(ServiceSpec::per_process(name, service), draft.rules.span)
}

struct HealthCheck {
    id: CheckId,
    draft: Draft,
    matches: Option<Arc<Match>>,
    timeout: Duration,
}

impl Service for HealthCheck {
    async fn run(context: Context<HealthCheck>) {
        let Some(configuration) = context.configuration::<Configuration>() else { return };
        let settings = context.settings();
        let stream: Arc<StreamConfiguration> = configuration.protocol().expect("a part of a stream block");
        let server = stream.server_of(settings.draft.scope).expect("a check belongs to a server");
        let asks = Checks {
            check: stream.upstreams.check(settings.id).clone(),
            configured: Configured::new(stream),
            server,
            worker: Rc::clone(context.worker()),
            settings,
        };
        run(&context, asks).await;
    }
}

struct Checks {
    settings: Arc<HealthCheck>,
    check: Check,
    configured: Rc<Configured>,
    server: ServerId,
    worker: Rc<Worker>,
}

impl Asks for Checks {
    type Kept = ();

    fn check(&self) -> &Check {
        &self.check
    }

    fn rules(&self) -> &Rules {
        &self.settings.draft.rules
    }

    async fn ask(&self, peer: &CheckedPeer, (): &mut ()) {
        let HealthCheck { draft, matches, timeout, .. } = &*self.settings;
        let session = Session::own(Rc::clone(&self.configured), Rc::clone(&self.worker), self.server);
        let proxy: &ProxySettings = session.scope().conf_of().expect("the proxy module is among the modules");
        let expect = matches.as_ref().and_then(|matches| matches.expect.as_ref());
        let judge = |bytes: &[u8]| expect.map_or(Verdict::Good, |expect| expect.judge(bytes));
        let question = Question {
            is_udp: draft.is_udp,
            send: matches.as_ref().and_then(|matches| matches.send.clone()),
            expect: expect.is_some().then_some(&judge),
            timeout: *timeout,
            group: self.check.group().name(),
        };
        let result = ask(&session, proxy, &draft.rules.address(peer), &question).await;
        let matches = matches.as_ref().map_or(BStr::new(""), |matches| matches.name.as_ref());
        let log = CheckLog { log: &session.scope().error_log, check: &self.check, peer, matches };
        match result {
            // A local error says nothing about the peer.
            Err(CheckError::Local(text)) => text.iter().for_each(|text| log.write(Level::Crit, text)),
            Err(CheckError::Server { text, action }) => log.note(Err(Failed { text, action }), draft.rules.thresholds),
            Ok(()) => log.note(Ok(()), draft.rules.thresholds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_escapes_are_bytes() {
        assert_eq!(unescaped(br"a\x00\xfFb\xg0\x"), b"a\x00\xffb\\xg0\\x");
    }

    #[test]
    fn text_matches_the_beginning_of_the_answer() {
        let expect = Expect::Text(b"+OK".to_vec());
        assert_eq!(expect.judge(b"+OK ready"), Verdict::Good);
        assert_eq!((expect.judge(b""), expect.judge(b"+O")), (Verdict::NeedMore, Verdict::NeedMore));
        assert_eq!(expect.judge(b"-ERR"), Verdict::Bad);
    }
}
