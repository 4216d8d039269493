//! The order in which modules act: every list that decides one, in one place.

use gale_engine::http::phases::Phase;
use gale_engine::module::{Module, Order};

#[cfg(debug_assertions)]
use crate::http::test_hooks;
use crate::http::{
    addition, auth_request, core as http_core, headers, index, log, mirror, not_modified, postpone, range, rewrite,
    ssi, static_files, try_files,
};
use crate::{core, event, inert};

/// Gale's modules in nginx's order.
pub static ORDER: Order = Order { modules: MODULES, phases: PHASES, filters: FILTERS };

/// Directives and variables are looked up in this order.
const MODULES: &[&Module] = &[
    &core::MODULE,
    &event::MODULE,
    &http_core::MODULE,
    &log::MODULE,
    &headers::MODULE,
    &not_modified::MODULE,
    &addition::MODULE,
    &ssi::MODULE,
    &postpone::MODULE,
    &range::MODULE,
    &static_files::MODULE,
    &index::MODULE,
    &try_files::MODULE,
    &mirror::MODULE,
    &auth_request::MODULE,
    &rewrite::MODULE,
    &inert::MODULE,
    #[cfg(debug_assertions)]
    &test_hooks::MODULE,
];

/// Within each phase, who is asked first.
const PHASES: &[(Phase, &[&Module])] = &[
    (Phase::ServerRewrite, &[&rewrite::MODULE]),
    (Phase::Rewrite, &[&rewrite::MODULE]),
    #[cfg(debug_assertions)]
    (Phase::PreAccess, &[&test_hooks::MODULE]),
    (Phase::Access, &[&auth_request::MODULE]),
    (Phase::PreContent, &[&try_files::MODULE, &mirror::MODULE]),
    (
        Phase::Content,
        &[
            #[cfg(debug_assertions)]
            &test_hooks::MODULE,
            &index::MODULE,
            &static_files::MODULE,
        ],
    ),
    (Phase::Log, &[&log::MODULE]),
];

/// Response filters: the first sees the response as its handler made it.
const FILTERS: &[&Module] =
    &[&not_modified::MODULE, &headers::MODULE, &addition::MODULE, &ssi::MODULE, &postpone::MODULE, &range::MODULE];
