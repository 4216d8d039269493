//! scgi: passes requests to SCGI applications.
//!   scgi_pass ADDRESS;                                  location, if in location
//!   scgi_param NAME VALUE [if_not_empty];
//!   and the directives of the protocol's groups (`upstream_rows.rs`)
//!                                                       http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_scgi_module.html>)

use std::any::Any;

use gale_config::{Contexts, Custom, Diagnostic, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::Flow;
use gale_http_upstream::caching::Consulted;
use gale_http_upstream::settings::UpstreamOf;
use gale_http_upstream::{KeepHead, Passing, pass_on};
use gale_protocol::scgi;
use gale_upstream::{AddressPass, plain};

use crate::http::cache_rows;
use crate::http::gateway::{self, Params};
use crate::http::upstream_pass::{PassRequests, consult_cache, look_up_status, note_store, serving};
use crate::http::upstream_rows::{self, own_row as row, upstream_protocol, upstream_table};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_scgi",
    directives: &upstream_table!([
        Directive {
            contexts: Contexts::LOCATION.or(Contexts::IF_IN_LOCATION),
            ..row(
                "scgi_pass",
                Takes::Exactly(1),
                "",
                "Sets the address of the application, or the group of servers, to which requests are passed.",
                &Custom(scgi_pass),
            )
        },
        row(
            "scgi_param",
            Takes::Between(2, 3),
            "",
            "Sets a parameter that is passed to the application; with if_not_empty only if the value is not empty.",
            &Custom(scgi_param),
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
    ScgiProtocol, Conf, "scgi",
    has [
        ConnectSettings, SocketBufferSettings, ExchangeSettings, DeadlineSettings, RetrySettings, HeadSettings,
        RequestBodySettings, ResponseBodySettings, CacheSettings, StaleSettings, StoreSettings,
    ],
    retry_on gateway::RETRY_CONDITIONS,
    pass_by pass,
}

#[derive(Default)]
struct Conf {
    upstream: UpstreamOf<ScgiProtocol>,
    /// Not inherited: a location's content handler is its own.
    pass: Option<AddressPass<Request>>,
    params: Params,
}

fn scgi_pass(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    conf.pass = Some(AddressPass::read(builder, statement, conf.pass.is_some(), plain)?);
    Ok(())
}

fn scgi_param(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    conf.params.add(builder, statement)
}

fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    let parent: Option<&Conf> = parent.and_then(|parent| parent.downcast_ref());
    conf.params.complete(parent.map(|parent| &parent.params), builder)?;
    let passes_requests = conf.pass.is_some();
    cache_rows::complete(&mut conf.upstream, parent.map(|parent| &parent.upstream), builder, None)?;
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
    let length = body.1.unwrap_or(0);
    let write = |request: &mut Request, passing: &mut Passing<'_>| {
        write_head(request, conf, length).map(|head| passing.set_head(head.into()))
    };
    // The block keeps the values that are only passed through out of the future.
    let mut passing = {
        let (target, caching, (body, _)) = (target, caching, body);
        gateway::passing_of_cgi(request, &conf.upstream, &target, "scgi://", (&write, body), &reader, caching)
    };
    Ok(pass_on(request, &mut passing).await)
}

/// Returns the head of the request to the application; the body has this length.
fn write_head(request: &Request, conf: &Conf, body_length: u64) -> Result<Vec<u8>, u16> {
    let mut head = Vec::with_capacity(1024);
    let mut params = scgi::Params::new(&mut head, body_length);
    let written = conf.params.write(request, &conf.upstream, &mut params);
    written.map_err(|fault| gateway::refuse(request, "scgi", fault))?;
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
