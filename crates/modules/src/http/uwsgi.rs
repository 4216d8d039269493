//! uwsgi: passes requests to uwsgi applications, for example in Python.
//!   uwsgi_pass [uwsgi://|suwsgi://]ADDRESS;                       location, if in location
//!   uwsgi_param NAME VALUE [if_not_empty];
//!   uwsgi_modifier1 NUMBER;  uwsgi_modifier2 NUMBER;  uwsgi_string TEXT;
//!   and the directives of the protocol's groups (`upstream_rows.rs`)
//!                                                       http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_uwsgi_module.html>)

use std::any::Any;

use bstr::BString;
use gale_config::{Contexts, Custom, Diagnostic, One, Setting, Statement, Takes, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::Flow;
use gale_http_upstream::caching::Consulted;
use gale_http_upstream::settings::UpstreamOf;
use gale_http_upstream::{KeepHead, Passing, pass_on};
use gale_protocol::uwsgi;
use gale_upstream::{AddressPass, BareAddress};

use crate::http::cache_rows;
use crate::http::gateway::{self, Params};
use crate::http::upstream_pass::{PassRequests, consult_cache, look_up_status, note_store, serving};
use crate::http::upstream_rows::{self, own_row as row, upstream_protocol, upstream_table};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_uwsgi",
    directives: &upstream_table!([
        Directive {
            contexts: Contexts::LOCATION.or(Contexts::IF_IN_LOCATION),
            ..row(
                "uwsgi_pass",
                Takes::Exactly(1),
                "",
                "Sets the address of the application, or the group of servers, to which requests are passed.",
                &Custom(uwsgi_pass),
            )
        },
        row(
            "uwsgi_param",
            Takes::Between(2, 3),
            "",
            "Sets a parameter that is passed to the application; with if_not_empty only if the value is not empty.",
            &Custom(uwsgi_param),
        ),
        row(
            "uwsgi_modifier1",
            Takes::Exactly(1),
            "0",
            "Sets the modifier1 field of the uwsgi packet header, which selects the kind of application.",
            &One { parse: modifier, slot: slot!(Conf, modifier1) },
        ),
        row(
            "uwsgi_modifier2",
            Takes::Exactly(1),
            "0",
            "Sets the modifier2 field of the uwsgi packet header.",
            &One { parse: modifier, slot: slot!(Conf, modifier2) },
        ),
        row(
            "uwsgi_string",
            Takes::Exactly(1),
            "",
            "Appends a string, unchanged, to the parameters of requests.",
            &One { parse: values::string, slot: slot!(Conf, string) },
        ),
    ]),
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        handlers: PassRequests::<Conf>::HANDLERS,
        reach: Some(note_store::<Conf>),
        ..HttpPart::EMPTY
    }],
};

upstream_protocol! {
    /// The protocol: responses of applications, which may be cached.
    UwsgiProtocol, Conf, "uwsgi",
    has [
        ConnectSettings, SocketBufferSettings, ExchangeSettings, DeadlineSettings, RetrySettings, HeadSettings,
        RequestBodySettings, ResponseBodySettings, CacheSettings, StaleSettings, StoreSettings, ServerTlsSettings,
    ],
    retry_on gateway::RETRY_CONDITIONS,
    pass_by pass,
}

#[derive(Default)]
struct Conf {
    upstream: UpstreamOf<UwsgiProtocol>,
    /// Not inherited: a location's content handler is its own.
    pass: Option<AddressPass<Request>>,
    params: Params,
    modifier1: Setting<u8>,
    modifier2: Setting<u8>,
    string: Setting<BString>,
}

fn uwsgi_pass(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    conf.pass = Some(AddressPass::read(builder, statement, conf.pass.is_some(), without_scheme)?);
    Ok(())
}

/// Splits the scheme, if there is one, off an address.
fn without_scheme(text: &[u8]) -> Result<BareAddress<'_>, &'static str> {
    let behind = |scheme: &[u8]| {
        let (start, rest) = text.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(rest)
    };
    let over_tls = behind(b"suwsgi://");
    let is_tls = over_tls.is_some();
    Ok(BareAddress { text: over_tls.or(behind(b"uwsgi://")).unwrap_or(text), is_tls })
}

fn uwsgi_param(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    conf.params.add(builder, statement)
}

fn modifier(statement: &Statement) -> Result<u8, Diagnostic> {
    values::number_between(statement, 0, u8::MAX.into()).map(|number| number as u8)
}

fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    let parent: Option<&Conf> = parent.and_then(|parent| parent.downcast_ref());
    conf.params.complete(parent.map(|parent| &parent.params), builder)?;
    let passes_requests = conf.pass.is_some();
    cache_rows::complete(&mut conf.upstream, parent.map(|parent| &parent.upstream), builder, None)?;
    if conf.pass.as_ref().is_some_and(AddressPass::may_be_tls) {
        upstream_rows::prepare_tls(&mut conf.upstream, builder)?;
    }
    upstream_rows::complete_temp_path(&mut conf.upstream, builder, passes_requests);
    conf.upstream.complete(&gateway::hidden())
}

/// Passes a request on. The error is the status of the response.
async fn pass(request: &mut Request, conf: &Conf) -> Result<Flow, u16> {
    let pass = conf.pass.as_ref().expect("a location with this handler has the setting");
    let target = pass.resolve_tls(request).await.map_err(look_up_status)?;
    let caching = match consult_cache(request, serving(&conf.upstream, &KeepHead)).await {
        Consulted::Answer(flow) => return Ok(flow),
        Consulted::Ask(caching) => caching,
    };
    let body = gateway::take_body(request, &conf.upstream, false).await?;
    let reader = gateway::cgi_reader(&conf.upstream);
    let write = |request: &mut Request, passing: &mut Passing<'_>| {
        write_head(request, conf).map(|head| passing.set_head(head.into()))
    };
    // The block keeps the values that are only passed through out of the future.
    let mut passing = {
        let (target, caching, (body, _)) = (target, caching, body);
        let scheme = if target.tls_host.is_some() { "suwsgi://" } else { "uwsgi://" };
        gateway::passing_of_cgi(request, &conf.upstream, &target, scheme, (&write, body), &reader, caching)
    };
    Ok(pass_on(request, &mut passing).await)
}

/// Returns the head of the request to the application.
fn write_head(request: &Request, conf: &Conf) -> Result<Vec<u8>, u16> {
    let mut head = Vec::with_capacity(1024);
    let mut params = uwsgi::Params::new(&mut head, *conf.modifier1.get(), *conf.modifier2.get());
    let written = conf.params.write(request, &conf.upstream, &mut params);
    let string = conf.string.get_opt().map_or(&b""[..], |string| string);
    let written = written.and_then(|()| params.push_raw(string));
    written.map_err(|fault| gateway::refuse(request, "uwsgi", fault))?;
    params.finish();
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::upstream_pass::tests::assert_small;

    #[test]
    fn a_request_that_is_passed_on_takes_one_small_allocation() {
        assert_small(|(request, conf)| pass(request, conf));
    }
}
