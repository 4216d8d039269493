//! stub_status: numbers of connections and requests.
//!   stub_status;          server, location
//!   $connections_active   $connections_reading   $connections_writing   $connections_waiting
//! (<https://nginx.org/en/docs/http/ngx_http_stub_status_module.html>)
//!
//! The numbers cover all workers. Every accepted connection is handled, so these two are always equal.

use gale_config::{Body as BlockBody, Contexts, Takes};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::phases::{Decide, Flow, Phase};
use gale_http::variables::Variable;
use gale_protocol::request::Method;
use gale_worker::{Totals, totals};

use super::content_switch::ContentSwitch;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_stub_status",
    directives: &[Directive {
        name: "stub_status",
        contexts: Contexts::SERVER.or(Contexts::LOCATION),
        // nginx required an argument before 1.7.5, and many configurations still have one.
        takes: Takes::Between(0, 1),
        body: BlockBody::None,
        default: "",
        about: "Enables the basic status page in the surrounding location.",
        store: Conf::TURN_ON,
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        variables: &[
            Variable::named("connections_active", |_, _, out| append(out, totals().active)),
            Variable::named("connections_reading", |_, _, out| append(out, totals().reading)),
            Variable::named("connections_writing", |_, _, out| append(out, totals().writing)),
            Variable::named("connections_waiting", |_, _, out| append(out, totals().waiting())),
        ],
        handlers: &[(Phase::Content, &Decide { applies: Conf::is_on, run: |request, _| answer(request) })],
        ..HttpPart::EMPTY
    }],
};

/// Name of the module in the type of its settings.
enum StubStatus {}

type Conf = ContentSwitch<StubStatus>;

fn answer(request: &mut Request) -> Flow {
    if !matches!(request.method(), Method::Get | Method::Head) {
        return Flow::Respond(405);
    }
    request.response.status = 200;
    request.response.content_type = b"text/plain".as_slice().into();
    Flow::Answer(Body::Bytes(describe(&totals()).into()))
}

fn describe(totals: &Totals) -> String {
    let Totals { accepted, active, requests, reading, writing } = totals;
    let waiting = totals.waiting();
    format!(
        "Active connections: {active} \n\
         server accepts handled requests\n \
         {accepted} {accepted} {requests} \n\
         Reading: {reading} Writing: {writing} Waiting: {waiting} \n"
    )
}

fn append(out: &mut Vec<u8>, number: u64) -> bool {
    out.extend_from_slice(number.to_string().as_bytes());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_nginx_s_to_the_byte() {
        let totals = Totals { accepted: 7, active: 3, requests: 12, reading: 1, writing: 1 };
        let expected = "Active connections: 3 \nserver accepts handled requests\n 7 7 12 \n\
                        Reading: 1 Writing: 1 Waiting: 1 \n";
        assert_eq!(describe(&totals), expected);
    }
}
