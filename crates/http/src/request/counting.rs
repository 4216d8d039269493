//! Counts a client's request in the zones of its server and its location (`status_zone`): when its server is known,
//! and when it is over, however it ends. Subrequests are parts of it and are not counted there.

use gale_worker::traffic::{Nanos, Served};

use super::configuration::HttpConfiguration;
use super::exchange::Transferred;
use super::{Request, slow};

/// Counts a request whose server is known.
pub(super) fn begin(request: &mut Request, http: &HttpConfiguration) {
    if let Some(zone) = &http.server(request.server).zone {
        request.record.is_counted = true;
        zone.traffic.begin();
    }
}

/// Ends a subrequest, for which only the use of a cache is counted.
pub(super) fn end_part(request: &Request) {
    if let Some(count) = request.record.at_end.filter(|_| !request.routing.kind.is_background()) {
        count(request);
    }
    slow::end_part(request);
}

/// Ends a request.
pub(super) fn end(request: &mut Request, http: &HttpConfiguration) {
    if !request.is_main() {
        return;
    }
    if let Some(count) = request.record.at_end {
        count(request);
    }
    let core = &http.scope(request.scope).core;
    if let Some(&Some(slow_request_log)) = core.slow_request_log.get_opt() {
        slow::end(request, slow_request_log);
    }
    let server = http.server(request.server).zone.as_deref();
    let location = core.location_zone.get_opt().and_then(Option::as_deref);
    if server.is_none() && location.is_none() {
        return;
    }
    let Transferred { received, sent } = request.transferred();
    let served = Served {
        code: (sent.bytes > 0).then_some(request.response.status),
        received,
        sent: sent.bytes,
        first_byte: request.record.answered.map(|answered| Nanos::between(request.arrival.started, answered)),
        whole: Some(Nanos::between(request.arrival.started, gale_runtime::now())),
    };
    let served = served.ready();
    if let Some(zone) = server {
        // The head was never complete.
        if !std::mem::take(&mut request.record.is_counted) {
            zone.traffic.begin();
        }
        zone.traffic.finish(&served);
    }
    if let Some(zone) = location {
        zone.pass(&served);
    }
}
