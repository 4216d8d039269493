//! Clients that play random plans at the same time, over either version of HTTP, and the checks at their end.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use gale_engine::serve::Serving;
use gale_process::Worker;
use gale_runtime::simulation::{Faults, Random, Simulation};
use gale_runtime::{SocketAddress, leased_bytes, now, sleep, task_count};

use super::requests::add_files;
use super::{SLOT, Site, Task, loop_options, run, unexpected_panics};

/// Default number of worlds for each test.
pub const SEEDS: u64 = 30;

/// Longest delay of a timeout by all delays of a world together.
pub const LATENESS: Duration = Duration::from_secs(3);

/// Long enough for every timeout of the server, one after the other.
pub const SETTLING: Duration = Duration::from_secs(5000);

/// Script of one client.
pub trait ClientPlan: Clone + Debug + 'static {
    /// The client's observations.
    type Seen: 'static;

    /// Plays the script on a connection of its own; `None` if there was no connection.
    fn play(self, random: Random) -> impl Future<Output = Option<Self::Seen>> + 'static;

    /// Address of the client.
    fn address_of(seen: &Self::Seen) -> &SocketAddress;

    /// Checks the observations; `was_cut` is true if the network has broken the connection.
    fn check(&self, seen: &Self::Seen, was_cut: bool);
}

/// A client that plays its plan.
pub struct Client<P: ClientPlan> {
    plan: P,
    task: Task<Option<P::Seen>>,
}

impl<P: ClientPlan> Client<P> {
    pub fn spawn(plan: P, random: &Random) -> Client<P> {
        Client { task: Task::spawn(plan.clone().play(random.fork())), plan }
    }

    /// Checks the client's observations by [`ClientPlan::check`].
    pub async fn check(self, simulation: &Simulation) {
        self.check_by(simulation, P::check).await;
    }

    /// Checks the client's observations, and prints its plan if that fails.
    pub async fn check_by(self, simulation: &Simulation, check: impl FnOnce(&P, &P::Seen, bool)) {
        let Some(seen) = self.task.take().await else { return };
        let was_cut = simulation.was_cut(P::address_of(&seen));
        let plan = self.plan;
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(&plan, &seen, was_cut))) {
            eprintln!("{:?}: {plan:?}", P::address_of(&seen));
            resume_unwind(panic);
        }
    }
}

/// Plays the clients that `spawn_all` begins at the same time, and checks their observations.
pub fn play<P: ClientPlan>(simulation: &Simulation, configuration: &str, spawn_all: impl FnOnce() -> Vec<Client<P>>) {
    add_files(simulation);
    run(simulation, configuration, async |serving| {
        let tasks = task_count();
        for client in spawn_all() {
            client.check(simulation).await;
        }
        check_nothing_is_left(simulation, serving, tasks).await;
    });
}

/// [`play`] with some reloads meanwhile.
pub fn play_over_reloads<P: ClientPlan>(
    simulation: &Simulation,
    configuration: &str,
    random: &Random,
    spawn_all: impl FnOnce() -> Vec<Client<P>>,
) {
    add_files(simulation);
    let site = Site::new(simulation, configuration);
    site.run(loop_options(simulation), async |serving| {
        let tasks = task_count();
        let clients = spawn_all();
        let mut old = Vec::new();
        for _ in 0..random.up_to(5) {
            sleep(Duration::from_millis(random.below(1500))).await;
            simulation.note("reloads", 0, serving.connections());
            let configuration = site.build();
            old.push(Arc::downgrade(&configuration));
            serving.commit(SLOT, configuration).await;
        }
        for client in clients {
            client.check(simulation).await;
        }
        check_nothing_is_left(simulation, serving, tasks).await;
        let held = old.iter().filter(|configuration| configuration.strong_count() > 0).count();
        assert_eq!(held, 1, "configurations are held");
    });
}

/// Faults of a network that breaks or refuses connections.
pub fn faults_that_break(random: &Random) -> Faults {
    Faults {
        cuts: *random.pick(&[0, 200, 600]),
        cut_within: Duration::from_millis(*random.pick(&[10, 500, 4000])),
        connect_failures: *random.pick(&[0, 200]),
        accept_aborts: *random.pick(&[0, 200]),
        ..Faults::swarm(random)
    }
}

/// Waits until the server has released everything, and checks that.
pub async fn check_nothing_is_left(simulation: &Simulation, serving: &Serving, tasks: usize) {
    let deadline = now() + SETTLING;
    while serving.connections() > 0 && now() < deadline {
        sleep(Duration::from_secs(1)).await;
    }
    // Time for data in transit, for tasks of pools without a waiter (read-ahead of a file), and for clients that vanish
    // late.
    sleep(simulation.faults().task_max * 2 + Duration::from_secs(30)).await;
    assert_eq!(serving.connections(), 0, "connections");
    assert_eq!(simulation.open_ends(), 0, "sockets");
    assert_eq!(simulation.pool_tasks(), 0, "tasks in pools");
    assert_eq!(task_count(), tasks, "tasks");
    assert_eq!(leased_bytes(), 0, "bytes on lease");
    assert_eq!(unexpected_panics(), 0, "panics");
}
