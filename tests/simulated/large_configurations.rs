//! Configurations with thousands of locations: settings that a block does not mention cost it no memory.

use std::sync::Arc;

use gale_engine::configuration::Configuration;
use gale_http::configuration::{HttpConfiguration, Scope, ScopeKind};
use gale_runtime::simulation::{Faults, Simulation};

use crate::support::Site;

fn build(http: &str) -> Arc<Configuration> {
    let text =
        format!("events {{ }} error_log /dev/null; http {{ access_log off; client_body_temp_path %TEMP%; {http} }}");
    Site::new(&Simulation::new(1, Faults::NONE), &text).build()
}

fn http(configuration: &Configuration) -> Arc<HttpConfiguration> {
    configuration.protocol().expect("an http block")
}

fn locations(http: &HttpConfiguration) -> Vec<&Scope> {
    http.scopes.iter().filter(|scope| scope.kind == ScopeKind::Location).collect()
}

/// Number of modules whose settings both scopes share, and number of those with separate settings.
fn shared_and_own(one: &Scope, other: &Scope) -> (usize, usize) {
    let both = one.confs.iter().flatten().zip(other.confs.iter().flatten());
    let shared = both.map(|(one, other)| Arc::ptr_eq(one, other));
    shared.fold((0, 0), |(shared, own), is_shared| if is_shared { (shared + 1, own) } else { (shared, own + 1) })
}

#[test]
fn locations_share_settings_that_they_do_not_mention() {
    let plain: String = (0..1000).map(|number| format!("location /p{number} {{ return 200 p{number}; }}")).collect();
    let configuration =
        build(&format!("server {{ listen %ADDRESS%; {plain} location /f {{ root /f; expires 1h; }} }}"));
    let http = http(&configuration);
    let locations = locations(&http);
    let (first, files) = (locations[0], locations[1000]);
    for other in &locations[1..1000] {
        assert!(Arc::ptr_eq(&first.core, &other.core), "{:?}", other.name);
        // Each location has its own script.
        let (shared, own) = shared_and_own(first, other);
        assert!(own == 1 && shared > 10, "{shared} {own}");
    }
    assert!(!Arc::ptr_eq(&first.core, &files.core));
    let (shared, own) = shared_and_own(first, files);
    assert!(own == 3 && shared > 10, "script, core and headers: {shared} {own}");
}

#[test]
fn shared_settings_come_from_the_block_around_them() {
    let configuration = build(
        "client_max_body_size 1;
         server { listen %ADDRESS%; location /a { location /a/b { } client_max_body_size 2; } location /c { } }
         server { listen %ADDRESS%; server_name x; client_max_body_size 3; location /a { } location /c { gzip on; } }",
    );
    let http = http(&configuration);
    let sizes = locations(&http)
        .into_iter()
        .map(|scope| (scope.name.as_ref().to_vec(), *scope.core.client_max_body_size.get()));
    let expected = [("/a", 2), ("/a/b", 2), ("/c", 1), ("/a", 3), ("/c", 3)];
    assert_eq!(sizes.collect::<Vec<_>>(), expected.map(|(name, size)| (name.as_bytes().to_vec(), size)));
}
