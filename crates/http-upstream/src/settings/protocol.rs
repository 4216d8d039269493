//! Protocols and their groups. A protocol is a type; the groups that it names are those that its directives can write.

use std::marker::PhantomData;
use std::ops::Deref;

use gale_config::Diagnostic;
use gale_http_cache::settings::CacheSettings;

use super::UpstreamSettings;
use crate::store_settings::StoreSettings;

/// A group of settings, filled by directives that some protocols have.
pub trait SettingsGroup: PartOfSettings + Default {
    /// The values for a protocol without these directives.
    fn absent() -> Self {
        Self::default()
    }
}

/// The place of a group among all.
pub trait PartOfSettings: Sized {
    /// The group for reading.
    fn of(settings: &UpstreamSettings) -> &Self;

    /// The group for writing.
    fn of_mut(settings: &mut UpstreamSettings) -> &mut Self;
}

// A cache or a store that no directive can set is off.
impl SettingsGroup for CacheSettings {}
impl SettingsGroup for StoreSettings {}

/// A protocol to servers.
pub trait UpstreamProtocol: 'static {
    /// Beginning of its directives' names: `proxy`, `fastcgi` and so on.
    const PREFIX: &'static str;

    /// The conditions of `…_next_upstream`, with their bits.
    const RETRY_CONDITIONS: &'static [(&'static str, u32)];

    /// The settings of a scope before its directives are applied: those of its groups are unset, all others fixed.
    fn begin() -> UpstreamSettings;
}

/// A protocol that has the directives of a group.
pub trait HasGroup<G>: UpstreamProtocol {}

/// The settings of a scope for a protocol. They are read as [`UpstreamSettings`]; only groups of the protocol can be
/// written.
pub struct UpstreamOf<P> {
    settings: UpstreamSettings,
    protocol: PhantomData<P>,
}

impl<P: UpstreamProtocol> Default for UpstreamOf<P> {
    fn default() -> UpstreamOf<P> {
        UpstreamOf { settings: P::begin(), protocol: PhantomData }
    }
}

impl<P> Deref for UpstreamOf<P> {
    type Target = UpstreamSettings;

    fn deref(&self) -> &UpstreamSettings {
        &self.settings
    }
}

impl<P: UpstreamProtocol> UpstreamOf<P> {
    /// A group of the protocol.
    pub fn group<G: SettingsGroup>(&self) -> &G
    where
        P: HasGroup<G>,
    {
        G::of(&self.settings)
    }

    /// As [`group`](UpstreamOf::group), for writing.
    pub fn group_mut<G: SettingsGroup>(&mut self) -> &mut G
    where
        P: HasGroup<G>,
    {
        G::of_mut(&mut self.settings)
    }

    /// Completes settings that have already inherited from the outer scope. `hidden` are the fields that are not passed
    /// to clients by default.
    ///
    /// # Errors
    /// Sizes that contradict each other, in nginx's words.
    pub fn complete(&mut self, hidden: &[&str]) -> Result<(), Diagnostic> {
        let settings = &mut self.settings;
        settings.number();
        settings.head.complete(hidden);
        settings.response_body.check(P::PREFIX, *settings.exchange.buffer_size.get())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::settings::{DeadlineSettings, HeadSettings, ResponseBodySettings};

    #[test]
    fn a_group_that_a_protocol_lacks_has_values() {
        let lacking = UpstreamSettings::without_groups();
        assert!(!lacking.sends_proxy_header() && !*lacking.http.pass_trailers.get());
        assert_eq!((*lacking.socket_buffers.socket_rcvbuf.get(), *lacking.socket_buffers.socket_sndbuf.get()), (0, 0));
        assert_eq!(*lacking.deadline.request_timeout.get(), Duration::ZERO);
        assert!(!*lacking.head.request_dynamic.get() && !*lacking.head.intercept_errors.get());
        assert!(*lacking.request_body.pass_request_headers.get() && *lacking.request_body.pass_request_body.get());
        assert!(!*lacking.request_body.request_buffering.get() && !*lacking.request_body.ignore_client_abort.get());
        assert!(!*lacking.response_body.buffering.get() && !*lacking.response_body.force_ranges.get());
        assert_eq!((lacking.buffers_bytes(), *lacking.response_body.max_temp_file_size.get()), (32_768, 0));
        assert!(lacking.response_body.temp_path.is_set() && lacking.response_body.limit_rate.is_set());
        assert_eq!(lacking.response_body.check("memcached", u64::MAX), Ok(()));
        assert!(!lacking.cache.is_on() && !lacking.store.is_on());
    }

    #[test]
    fn a_group_that_a_protocol_has_is_left_to_its_directives() {
        let mut settings = UpstreamSettings::without_groups();
        settings.begin::<HeadSettings>();
        settings.begin::<ResponseBodySettings>();
        assert!(!settings.head.request_dynamic.is_set() && !settings.head.intercept_errors.is_set());
        assert!(!settings.response_body.buffers.is_set() && !settings.response_body.temp_path.is_set());
        assert!(DeadlineSettings::of(&settings).request_timeout.is_set());
    }

    /// A protocol that only has heads.
    struct OnlyHeads;

    impl UpstreamProtocol for OnlyHeads {
        const PREFIX: &'static str = "heads";
        const RETRY_CONDITIONS: &'static [(&'static str, u32)] = &[];

        fn begin() -> UpstreamSettings {
            let mut settings = UpstreamSettings::without_groups();
            settings.begin::<HeadSettings>();
            settings.exchange.buffer_size.set(4096, None);
            settings
        }
    }

    impl HasGroup<HeadSettings> for OnlyHeads {}

    #[test]
    fn the_settings_of_each_scope_have_a_number_of_their_own() {
        let [mut one, mut other] = [UpstreamOf::<OnlyHeads>::default(), UpstreamOf::default()];
        one.group_mut().hide_header.set(vec!["X-Own".into()], None);
        assert_eq!((one.complete(&["Date"]), other.complete(&["Date"])), (Ok(()), Ok(())));
        assert_ne!(one.id, other.id);
        let hides = |settings: &UpstreamSettings, name: &'static [u8]| settings.head.hidden.has(&name.into());
        assert_eq!([hides(&one, b"Date"), hides(&one, b"X-Own"), hides(&other, b"X-Own")], [true, true, false]);
    }
}
