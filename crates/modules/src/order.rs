//! The order in which modules act. Every list that decides an order is in this file.

use gale_engine::module::{Module, Order};
use gale_http::module::HttpOrder;
use gale_http::request::phases::Phase;
use gale_stream::module::StreamOrder;
use gale_stream::session::phases::Phase as StreamPhase;

#[cfg(feature = "test-hooks")]
use crate::http::test_hooks;
use crate::http::{
    access, acme, addition, api, auth_basic, auth_request, autoindex, browser, charset, client_body, core as http_core,
    dashboard, dav, empty_gif, fastcgi, flv, geo, geoip, grpc, gunzip, gzip, gzip_static, headers, index, limit_conn,
    limit_req, log, map, memcached, mirror, mp4, not_modified, otel, postpone, prometheus, proxy, random_index, range,
    realip, realpath_root, referer, rewrite, scgi, secure_link, slice, split_clients, ssi, ssl, static_files,
    stub_status, sub, try_files, tunnel, upstream, userid, uwsgi, v2, variables,
};
#[cfg(feature = "test-hooks")]
use crate::test_service;
use crate::{core, event, inert, stream};

/// Gale's modules in nginx's order.
pub static ORDER: Order = Order {
    modules: MODULES,
    protocols: &[
        &HttpOrder { phases: PHASES, filters: FILTERS },
        &StreamOrder { phases: STREAM_PHASES, content: STREAM_CONTENT },
    ],
    figures: Some(api::figures),
};

/// Order in which directives and variables are looked up.
const MODULES: &[&Module] = &[
    &core::MODULE,
    &event::MODULE,
    &http_core::MODULE,
    &variables::COMMON,
    &upstream::MODULE,
    &upstream::STICKY,
    &upstream::NTLM,
    &client_body::MODULE,
    &realpath_root::MODULE,
    &log::MODULE,
    &headers::MODULE,
    &userid::MODULE,
    &not_modified::MODULE,
    &slice::MODULE,
    &gunzip::MODULE,
    &addition::MODULE,
    &sub::MODULE,
    &charset::MODULE,
    &ssi::MODULE,
    &postpone::MODULE,
    &gzip::MODULE,
    &gzip_static::MODULE,
    &range::MODULE,
    &static_files::MODULE,
    &dav::MODULE,
    &autoindex::MODULE,
    &index::MODULE,
    &random_index::MODULE,
    &empty_gif::MODULE,
    &flv::MODULE,
    &mp4::MODULE,
    &proxy::MODULE,
    &grpc::MODULE,
    &fastcgi::MODULE,
    &uwsgi::MODULE,
    &scgi::MODULE,
    &memcached::MODULE,
    &tunnel::MODULE,
    &stub_status::MODULE,
    &api::MODULE,
    &prometheus::MODULE,
    &dashboard::MODULE,
    &try_files::MODULE,
    &mirror::MODULE,
    &auth_request::MODULE,
    &auth_basic::MODULE,
    &access::MODULE,
    &limit_conn::MODULE,
    &limit_req::MODULE,
    &realip::MODULE,
    &ssl::MODULE,
    &otel::MODULE,
    &acme::MODULE,
    &v2::MODULE,
    &rewrite::MODULE,
    &referer::MODULE,
    &secure_link::MODULE,
    &browser::MODULE,
    &map::MODULE,
    &geo::MODULE,
    &geoip::MODULE,
    &split_clients::MODULE,
    &stream::core::MODULE,
    &stream::variables::COMMON,
    &stream::log::MODULE,
    &stream::proxy::MODULE,
    &stream::upstream::MODULE,
    &stream::health::MODULE,
    &stream::ssl::MODULE,
    &stream::limit_conn::MODULE,
    &stream::limit_session::MODULE,
    &stream::access::MODULE,
    &stream::realip::MODULE,
    &stream::geo::MODULE,
    &stream::geoip::MODULE,
    &stream::map::MODULE,
    &stream::split_clients::MODULE,
    &stream::return_text::MODULE,
    &stream::pass::MODULE,
    &stream::set::MODULE,
    &stream::ssl_preread::MODULE,
    &inert::MODULE,
    #[cfg(feature = "test-hooks")]
    &test_hooks::MODULE,
    #[cfg(feature = "test-hooks")]
    &test_service::MODULE,
];

/// Order of the modules' handlers within each phase.
const PHASES: &[(Phase, &[&Module])] = &[
    // Certificate issuers get their challenge responses before any check of the client.
    (Phase::PostRead, &[&acme::MODULE, &realip::MODULE, &client_body::MODULE]),
    (Phase::ServerRewrite, &[&rewrite::MODULE]),
    // `otel` runs before a rewrite can change the location.
    (Phase::Rewrite, &[&otel::MODULE, &rewrite::MODULE]),
    (
        Phase::PreAccess,
        &[
            #[cfg(feature = "test-hooks")]
            &test_hooks::MODULE,
            &realip::MODULE,
            &limit_req::MODULE,
            &limit_conn::MODULE,
            &realpath_root::MODULE,
        ],
    ),
    (Phase::Access, &[&access::MODULE, &auth_basic::MODULE, &auth_request::MODULE]),
    (Phase::PreContent, &[&try_files::MODULE, &mirror::MODULE]),
    (
        Phase::Content,
        &[
            #[cfg(feature = "test-hooks")]
            &test_hooks::MODULE,
            &proxy::MODULE,
            &grpc::MODULE,
            &fastcgi::MODULE,
            &uwsgi::MODULE,
            &scgi::MODULE,
            &memcached::MODULE,
            &tunnel::MODULE,
            &empty_gif::MODULE,
            &flv::MODULE,
            &mp4::MODULE,
            &stub_status::MODULE,
            &api::MODULE,
            &prometheus::MODULE,
            &dashboard::MODULE,
            &random_index::MODULE,
            &index::MODULE,
            &autoindex::MODULE,
            &dav::MODULE,
            &gzip_static::MODULE,
            &static_files::MODULE,
        ],
    ),
    (Phase::Log, &[&log::MODULE, &otel::MODULE]),
];

/// Order of the modules' handlers within each phase of a session.
const STREAM_PHASES: &[(StreamPhase, &[&Module])] = &[
    (StreamPhase::PostAccept, &[&stream::realip::MODULE]),
    (StreamPhase::PreAccess, &[&stream::set::MODULE, &stream::limit_session::MODULE, &stream::limit_conn::MODULE]),
    (StreamPhase::Access, &[&stream::access::MODULE]),
    (StreamPhase::Preread, &[&stream::ssl_preread::MODULE]),
    (StreamPhase::Start, &[&stream::log::MODULE]),
    (StreamPhase::Log, &[&stream::log::MODULE]),
];

/// Content handlers of sessions. A server has one of them.
const STREAM_CONTENT: &[&Module] = &[&stream::return_text::MODULE, &stream::pass::MODULE, &stream::proxy::MODULE];

/// Response filters: the first one sees the response as its handler made it. Range comes last, because a changed body
/// has no ranges, unless its length stays the same (`charset`).
const FILTERS: &[&Module] = &[
    // All other filters see the response that `slice` has assembled.
    &slice::MODULE,
    &not_modified::MODULE,
    &grpc::MODULE,
    &headers::MODULE,
    &userid::MODULE,
    &gunzip::MODULE,
    &addition::MODULE,
    &sub::MODULE,
    &charset::MODULE,
    &ssi::MODULE,
    // From here on the output of subrequests is part of the body.
    &postpone::MODULE,
    &gzip::MODULE,
    &range::MODULE,
];
