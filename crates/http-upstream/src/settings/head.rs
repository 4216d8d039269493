//! Heads of requests and responses.

use std::sync::Arc;

use bstr::BString;
use gale_config::Setting;

use super::{HiddenFields, Ignored, SettingsGroup};

/// Settings of protocols whose requests and responses have fields.
#[derive(Default)]
pub struct HeadSettings {
    /// Write the request anew for each server.
    pub request_dynamic: Setting<bool>,
    /// Apply `error_page` to errors of the server, too.
    pub intercept_errors: Setting<bool>,
    /// Fields to hide, besides the default ones.
    pub hide_header: Setting<Vec<BString>>,
    /// Fields of the default ones that are not hidden.
    pub pass_header: Setting<Vec<BString>>,
    /// Fields of a response that Gale ignores.
    pub ignore_headers: Setting<Vec<Ignored>>,
    /// Bits of `ignore_headers`.
    pub ignored: Ignored,
    /// The fields to hide, from `hide_header` and `pass_header`.
    pub hidden: Arc<HiddenFields>,
    /// Pass the server's `Server` field on, and add none if it is missing.
    pub leaves_server_field: bool,
}

impl SettingsGroup for HeadSettings {
    fn absent() -> HeadSettings {
        HeadSettings {
            request_dynamic: Setting::of(false),
            intercept_errors: Setting::of(false),
            ..HeadSettings::default()
        }
    }
}

impl HeadSettings {
    /// Derives the values that requests use. `hidden` are the fields hidden by default.
    pub(super) fn complete(&mut self, hidden: &[&str]) {
        let ignored = self.ignore_headers.get_opt().map(Vec::as_slice).unwrap_or_default();
        self.ignored = ignored.iter().fold(Ignored::default(), |all, more| all.or(*more));
        let list = |setting: &Setting<Vec<BString>>| setting.get_opt().cloned().unwrap_or_default();
        self.hidden = Arc::new(HiddenFields::new(hidden, &list(&self.hide_header), &list(&self.pass_header)));
    }
}
