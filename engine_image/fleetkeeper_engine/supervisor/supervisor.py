"""Main loop of pid 1: starts one vLLM, watches it, applies limits, and ends it cleanly."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.devices.cgroup import Cgroup
from fleetkeeper_engine.devices.interface import DeviceMemory, Devices
from fleetkeeper_engine.shm.ledger import FILE as LEDGER_FILE
from fleetkeeper_engine.shm.region import FILE as REGION_FILE
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.spec import EngineDocument
from fleetkeeper_engine.supervisor.control_api.auth import Verifier
from fleetkeeper_engine.supervisor.control_api.server import ControlPort, serve_control
from fleetkeeper_engine.supervisor.control_api.usage import UsagePort
from fleetkeeper_engine.supervisor.control_api.usage_auth import UsageVerifier
from fleetkeeper_engine.supervisor.control_files import CONTROL_FILES_PERIOD_S, ControlFiles
from fleetkeeper_engine.supervisor.drain import DrainClock, DrainPhase, decide_drain
from fleetkeeper_engine.supervisor.drain_socket import DRAIN_SOCKET, serve_drain_socket
from fleetkeeper_engine.supervisor.engine_client import EngineClient
from fleetkeeper_engine.supervisor.health import NO_START, SERVER_PERIOD_S
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError
from fleetkeeper_engine.supervisor.launch.prepare import prepare
from fleetkeeper_engine.supervisor.launch.prepared import Prepared
from fleetkeeper_engine.supervisor.launch.start_measurements import write_measured
from fleetkeeper_engine.supervisor.memory.release import release_memory
from fleetkeeper_engine.supervisor.memory.watch import (
    SAMPLE_PERIOD_S,
    MemoryState,
    fullest,
)
from fleetkeeper_engine.supervisor.output import Outlet
from fleetkeeper_engine.supervisor.process import Child, Reaper
from fleetkeeper_engine.supervisor.state import PodState
from fleetkeeper_engine.supervisor.termination import Death, classify_death, with_profile

logger = logging.getLogger("fleetkeeper.supervisor")

HEALTH_PERIOD_S = 0.5
REMEMBER_PERIOD_S = 30.0
DRAIN_POLL_S = 0.05
START_POLL_S = 0.5
OUTPUT_PATIENCE_S = 2.0
"""After vLLM has ended, its grandchildren may hold the output pipe open for this long."""
STANDALONE_UID = "standalone"


class Supervisor:
    """One run of one engine."""

    def __init__(
        self,
        document: EngineDocument,
        environment: Mapping[str, str],
        run_directory: Path,
        outlets: tuple[Outlet, Outlet],
    ) -> None:
        self.document = document
        self.environment = environment
        self.run_directory = run_directory
        self._reaper = Reaper(outlets[0])
        self._pod = PodState(
            document=document,
            region=Region.create(
                run_directory / REGION_FILE, ranks=document.engine.tensor_parallel_size
            ),
            memory=MemoryState(cap_ratio=document.memory.cap_percent / 100),
            outlets=outlets,
        )
        self._verifier = Verifier(
            environment.get("POD_UID") or STANDALONE_UID, document.control.issuer
        )
        self._usage_verifier = UsageVerifier(environment.get("POD_UID") or STANDALONE_UID)
        self._control_files = ControlFiles(self._verifier, self._usage_verifier, self._pod)
        self._usage = UsagePort(
            self._usage_verifier, run_directory / LEDGER_FILE, document.model.served_name
        )
        self._client: EngineClient | None = None
        self._child: Child | None = None
        self._drain: DrainClock | None = None
        self._drain_began = asyncio.Event()
        self._drained = asyncio.Event()
        self._hang = ""
        """Why vLLM was killed as hung; empty if it was not."""
        self._memory_own = True
        self._over: asyncio.Future[Death] = asyncio.get_running_loop().create_future()

    async def run(self) -> Death | None:
        """Run until the engine ended. Return None after a drain, else the class of its end."""
        group = Cgroup.of_this_process()
        kills_before = group.oom_kills() if group else 0
        self._reaper.start()
        self._handle_signals()
        self._control_files.apply()
        self._pod.write(time.monotonic())
        ports = self.document.ports
        try:
            runner = await serve_control(
                ControlPort(self._pod, self._verifier, self._scrape, self._usage),
                ports.host,
                ports.control,
            )
        except OSError as error:
            message = f"cannot listen on control port {ports.host}:{ports.control}: {error}"
            return Death(DeathClass.UNKNOWN, message, "start")
        drain_socket = serve_drain_socket(
            self.run_directory / DRAIN_SOCKET, self.drain, self._drained
        )
        tasks = [asyncio.create_task(self._keep(drain_socket, "drain socket"))]
        try:
            prepared = await self._prepared()
            if prepared is None:
                return None
            self._child = await self._start(prepared)
            tasks += [
                asyncio.create_task(self._keep(loop, name))
                for name, loop in self._loops(prepared).items()
            ]
            ends: list[asyncio.Future[Any]] = [self._child.ended, self._over]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return await self._ended(group.oom_kills() - kills_before if group else 0)
        except StartRefusedError as error:
            return Death(error.death, str(error), error.phase)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._client is not None:
                await self._client.close()
            await self._usage.wait_until_read()
            await runner.cleanup()
            self._reaper.stop()

    def drain(self) -> None:
        """Begin to drain. A second call changes nothing."""
        if self._drain is not None:
            return
        settings = self.document.drain
        self._drain = DrainClock(
            time.monotonic(), float(settings.seconds), float(settings.notice_seconds)
        )
        self._pod.draining = True
        self._pod.drain_deadline = self._drain.abort_deadline
        self._drain_began.set()
        logger.info("draining timeout_s=%d", settings.seconds)

    async def _prepared(self) -> Prepared | None:
        """Return the prepared start; None if the drain began before."""
        preparing = asyncio.ensure_future(
            prepare(self.document, self.environment, self.run_directory, self._reaper.spawn)
        )
        leaving = asyncio.ensure_future(self._drain_began.wait())
        first: list[asyncio.Future[Any]] = [preparing, leaving]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if preparing.done():
            return preparing.result()
        preparing.cancel()
        return None

    async def _start(self, prepared: Prepared) -> Child:
        self._pod.vllm_version = prepared.features.vllm_version
        self._client = EngineClient(self.document, prepared.internal_token)
        self._client.authorize(self.environment)
        logger.info("starting vLLM %s argv=%s", prepared.features.vllm_version, prepared.argv)
        child = await self._reaper.spawn(prepared.argv, prepared.environment)
        self._pod.child_alive = True
        return child

    def _loops(self, prepared: Prepared) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "memory": self._watch_memory(prepared.devices),
            "startup": self._watch_startup(prepared),
            "health": self._watch_health(),
            "server": self._watch_server(),
            "control files": self._watch_control_files(),
            "drain": self._watch_drain(),
        }

    async def _keep(self, loop: Coroutine[Any, Any, None], name: str) -> None:
        """End the pod with the reason if a loop fails: half a supervisor is worse than none."""
        try:
            await loop
        except Exception as error:
            logger.exception("%s loop failed", name)
            if not self._over.done():
                message = f"the supervisor's {name} loop failed: {type(error).__name__} {error}"
                self._over.set_result(Death(DeathClass.UNKNOWN, message, self._phase))

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain)

    async def _watch_memory(self, devices: Devices) -> None:
        reported = ""
        while True:
            try:
                self._observe_memory(fullest(devices.read()))
            except OSError as error:
                # Without a measurement the metric is absent; the engine continues to serve.
                if str(error) != reported:
                    logger.warning("memory measurement failed: %s", error)
                reported = str(error)
            await asyncio.sleep(SAMPLE_PERIOD_S)

    def _observe_memory(self, use: DeviceMemory) -> None:
        # Before vLLM uses a device none of its processes can be listed.
        if self._pod.started and use.own != self._memory_own:
            self._memory_own = use.own
            logger.warning(
                "memory is measured for %s",
                "this pod's processes alone"
                if use.own
                else f"whole devices, including other pods: {self._pod.kind.process_list} does not list this pod's processes",
            )
        if self._pod.observe_memory(use, time.monotonic()):
            memory = self._pod.memory
            logger.warning(
                "memory %.1f%%, cap %.0f%%: %s",
                100 * memory.used_ratio,
                100 * memory.cap_ratio,
                "no new sequences start" if memory.over_cap else "new sequences start again",
            )

    async def _watch_startup(self, prepared: Prepared) -> None:
        while (problem := await self._first_token()) is not None:
            if problem:
                logger.warning("start-up probe generated no token: %s", problem)
            await asyncio.sleep(START_POLL_S)
        # A model may run with logprobs disabled, so a refusal does not keep the pod from being ready.
        if problem := await self._engine_client.warm_up():
            logger.warning("warm-up for logprobs failed: %s", problem)
        self._pod.server_answered = self._pod.ready_at = time.monotonic()
        self._pod.started = True
        logger.info("ready: a token was generated")
        await self._remember(prepared)

    async def _first_token(self) -> str | None:
        """Return None once a token was generated, "" while the server does not answer yet, else the problem."""
        if not await self._engine_client.answers():
            return ""
        self._pod.first_answer = self._pod.first_answer or time.monotonic()
        return await self._engine_client.generates()

    async def _remember(self, prepared: Prepared) -> None:
        """Save the peak beyond the plan whenever it grows: the next start plans with it."""
        kept = -1
        while True:
            beyond = self._pod.memory.peak_bytes - prepared.planned_bytes
            if beyond > max(kept * 1.01, 0):
                write_measured(self.run_directory, prepared.measured_key, beyond)
                kept = beyond
            release_memory()
            await asyncio.sleep(REMEMBER_PERIOD_S)

    async def _watch_health(self) -> None:
        began = time.monotonic()
        # From then on vLLM stops on purpose, and the drain kills it if it does not.
        while not self._drained.is_set():
            now = time.monotonic()
            self._pod.observe(now)
            late = not self._pod.started and now - began > self.document.health.startup_seconds
            hang = NO_START if late else self._pod.hang(now)
            if hang and self._child is not None:
                logger.error("hung, killing vLLM: %s", hang)
                self._hang = hang
                self._child.kill_session()
                return
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def _watch_server(self) -> None:
        client = self._engine_client
        while True:
            await asyncio.sleep(SERVER_PERIOD_S)
            if self._pod.started and await client.answers():
                self._pod.server_answered = time.monotonic()

    async def _watch_control_files(self) -> None:
        while True:
            await asyncio.sleep(CONTROL_FILES_PERIOD_S)
            self._control_files.apply()

    async def _watch_drain(self) -> None:
        await self._drain_began.wait()
        stop_sent: float | None = None
        while self._drain is not None and self._child is not None:
            now = time.monotonic()
            phase = decide_drain(
                self._drain, unfinished=self._pod.unfinished(), stop_sent=stop_sent, now=now
            )
            if phase is not DrainPhase.NOTICE and not self._pod.admission_closed:
                self._pod.admission_closed = True
                self._pod.write(now)
            if phase is DrainPhase.STOPPING and stop_sent is None:
                logger.info("drained, stopping vLLM unfinished=%d", self._pod.unfinished())
                self._drained.set()
                self._child.terminate()
                stop_sent = now
            if phase is DrainPhase.KILLING:
                self._child.kill_session()
                return
            await asyncio.sleep(DRAIN_POLL_S)

    async def _scrape(self) -> bytes | None:
        return await self._client.metrics() if self._client and self._pod.child_alive else None

    @property
    def _engine_client(self) -> EngineClient:
        if self._client is None:
            raise RuntimeError("vLLM is not started")
        return self._client

    async def _ended(self, oom_kills: int) -> Death | None:
        """Classify the end of the child."""
        child = self._child
        if child is None:
            return None
        self._pod.child_alive = False
        status = None if child.alive else child.ended.result()
        child.kill_session()
        if child.tee is not None:
            await asyncio.wait([child.tee], timeout=OUTPUT_PATIENCE_S)
        if self._over.done():
            return self._over.result()
        if self._drain is not None and not self._hang:
            self._drained.set()
            return None
        death = classify_death(
            list(child.lines),
            status=status,
            phase=self._phase,
            oom_kills=oom_kills,
            hang=self._hang,
        )
        return with_profile(death, self.document.engine.profile)

    @property
    def _phase(self) -> str:
        return "serve" if self._pod.started else "start"
